"""Train a small language model to call tools, with the same code as a large one.

    python examples/tools.py                          # a built-in tiny policy, a few minutes on a laptop CPU
    python examples/tools.py --model NAME_OR_PATH --max_turn_tokens 512
    python examples/tools.py --config run.yaml        # every field of GRPOEnvConfig and of TRL's ModelConfig

The questions are about a price list: an answer requires one or two lookups and often a calculation, each of them a tool
call. The tiny policy first imitates a player that acts at random in about half of its turns, which shows it the format
of calls; reinforcement learning then finds the useful ones. The script writes ``summary.json``,
``learning_curve.png``, transcripts of the same tasks before and after training, and ``model/`` to ``outputs/tools``.
Ctrl-C and SIGTERM end training early and keep the policy.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

from agentsgym import TrainingRun, tiny_policy
from agentsgym.envs.PriceList import ImitationPlayer, PriceListEnv, RandomPlayer, ReferencePlayer
from agentsgym.recipes.from_values import PolicyOptions, parse_options
from agentsgym.recipes.scripts import load_policy, quiet_logging
from agentsgym.reports.tables import comparison_table
from agentsgym.seeding import derive_seed

# Defaults for the tiny policy.
TINY_DEFAULTS: dict[str, Any] = {
    "advantage_estimator": "return_to_go",
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant",
    "max_steps": 800,
    "per_device_train_batch_size": 16,
    "steps_per_generation": 4,
    "num_generations": 8,
    "max_turn_tokens": 16,
}


@dataclass
class TaskOptions(PolicyOptions):
    """Options for the questions, the policy and the number of episodes."""

    kinds: list[str] = field(
        default_factory=lambda: ["price", "sum", "product"],
        metadata={"help": "Kinds of questions: price, sum, product."},
    )
    max_price: int = field(default=9, metadata={"help": "The highest price."})
    max_steps_per_episode: int = field(default=6, metadata={"help": "Maximum number of turns per episode."})
    num_tasks: int = field(default=600, metadata={"help": "Number of questions in each evaluation."})
    num_train_tasks: int = field(default=20_000, metadata={"help": "Number of training questions."})
    num_demonstrations: int = field(
        default=8000, metadata={"help": "Number of episodes that the tiny policy imitates."}
    )
    noise: float = field(default=0.5, metadata={"help": "Fraction of random turns in the demonstrations."})
    warm_start_steps: int = field(default=3000, metadata={"help": "Number of optimizer steps of imitation."})


def main() -> None:
    """Evaluate, imitate, train, evaluate again, and print the comparison."""
    task, args, model_config = parse_options(TaskOptions, output_dir="outputs/tools", tiny_defaults=TINY_DEFAULTS)
    quiet_logging()
    env_config: dict[str, Any] = {
        "kinds": task.kinds,
        "max_price": task.max_price,
        "max_steps_per_episode": task.max_steps_per_episode,
    }
    if task.model is None:
        env_config["system_prompt"] = ""  # the tiny policy learns the task without instructions
        policy = tiny_policy(PriceListEnv(env_config=env_config), seed=args.seed)
    else:
        policy = load_policy(task.model, model_config, trust_remote_code=args.trust_remote_code)
    run = TrainingRun(policy, args, model_config, overwrite=task.overwrite)
    env = PriceListEnv(run.tokenizer, env_config)
    tasks = env.tasks(task.num_tasks, seed=args.seed, part="eval")

    run.evaluate("random", env, tasks, RandomPlayer(env, seed=args.seed))
    run.evaluate("optimal", env, tasks, ReferencePlayer(env, seed=args.seed))
    if task.model is None:  # it imitates a player that often replaces the optimal action with a random one
        run.evaluate("untrained", env, tasks)
        questions = env.tasks(task.num_demonstrations, seed=derive_seed("demonstrations", args.seed))
        player = ImitationPlayer(env, seed=args.seed, noise=task.noise)
        run.warm_start(run.play("demonstrations", env, questions, player), task.warm_start_steps)
    run.evaluate("before", env, tasks)
    curve = run.learning_curve(references=["random", "optimal"])
    rows = PriceListEnv.get_train_dataset(env_config, size=task.num_train_tasks, seed=args.seed)
    run.learn(env, rows, callbacks=[curve])
    after = run.evaluate("after", env, tasks)

    curve.draw(after=after.win_rate)
    run.write_transcripts("before", "after")
    run.write_summary(
        fraction_of_optimal=fraction_of_optimal(run),
        env_config=env_config,
        cpu_seconds=round(time.process_time(), 1),
        settings=vars(task),
    )
    print(f"\n{comparison_table(run.evaluations)}\n\n{closing_words(run)}")
    sys.exit(run.phases.status)


def fraction_of_optimal(run: TrainingRun) -> float:
    """Return the mean reward after training, as a fraction of the mean reward of optimal play."""
    after, optimal = (run.evaluations[name].reward for name in ("after", "optimal"))
    return after.mean / optimal.mean if after and optimal else 0.0


def closing_words(run: TrainingRun) -> str:
    """Describe the result and where the files are."""
    return (
        f"{fraction_of_optimal(run):.0%} of optimal, on questions and prices that were not trained on. "
        f"{run.phases.total_seconds:.0f} s in total. "
        f"Everything is in {run.output}."
    )


if __name__ == "__main__":
    main()
