"""Train a small language model to play Twenty Questions, with the same code as a large one.

    python examples/twenty_questions.py                        # a built-in tiny policy, a few minutes on a laptop CPU
    python examples/twenty_questions.py --model NAME_OR_PATH --objects all --max_steps_per_episode 20
    python examples/twenty_questions.py --config run.yaml      # every field of GRPOEnvConfig and of TRL's ModelConfig

It writes ``summary.json``, ``learning_curve.png``, transcripts of the same tasks before and after training, and
``model/`` to ``outputs/twenty_questions``. Ctrl-C and SIGTERM end training early and keep the policy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentsgym import TrainingRun, tiny_policy
from agentsgym.envs.TwentyQuestions import (
    DEMO_OBJECTS,
    DEMO_PROPERTIES,
    GreedyPlayer,
    ImitationPlayer,
    RandomPlayer,
    TwentyQuestionsEnv,
)
from agentsgym.recipes.from_values import PolicyOptions, parse_options
from agentsgym.recipes.scripts import load_policy, quiet_logging
from agentsgym.reports.tables import comparison_table
from agentsgym.seeding import derive_seed

# Defaults for the tiny policy; docs/results.md reports its results with them.
TINY_DEFAULTS: dict[str, Any] = {
    "advantage_estimator": "gigpo",
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant",
    "max_steps": 2000,
    "per_device_train_batch_size": 16,
    "steps_per_generation": 4,
    "num_generations": 8,
    "max_turn_tokens": 12,
}


@dataclass
class GameOptions(PolicyOptions):
    """Options for the game, the policy and the number of games."""

    objects: list[str] = field(default_factory=lambda: ["demo"], metadata={"help": "Objects: 'demo', 'all', or names."})
    properties: list[str] | None = field(
        default=None,
        metadata={
            "help": "Properties: 'demo', 'all', or keys; by default 'demo' with the demo objects, otherwise 'all'."
        },
    )
    max_steps_per_episode: int = field(default=7, metadata={"help": "Maximum number of turns per game."})
    num_games: int = field(
        default=1056, metadata={"help": "Number of games in each evaluation, spread evenly over all objects."}
    )
    num_demonstrations: int = field(default=16_000, metadata={"help": "Number of games that the tiny policy imitates."})
    warm_start_steps: int = field(default=3500, metadata={"help": "Number of optimizer steps of imitation."})


def main() -> None:
    """Evaluate, imitate, train, evaluate again, and print the comparison."""
    game, args, model_config = parse_options(
        GameOptions, output_dir="outputs/twenty_questions", tiny_defaults=TINY_DEFAULTS
    )
    quiet_logging()
    env_config = game_config(game)
    if game.model is None:
        policy = tiny_policy(TwentyQuestionsEnv(env_config=env_config), seed=args.seed)
    else:
        policy = load_policy(game.model, model_config, trust_remote_code=args.trust_remote_code)
    run = TrainingRun(policy, args, model_config, unit="game", overwrite=game.overwrite)
    env = TwentyQuestionsEnv(run.tokenizer, env_config)
    secrets = list(env.candidates.objects)
    tasks = make_tasks(secrets, "evaluation", game.num_games, args.seed)

    players = {"random": RandomPlayer(env, seed=args.seed), "greedy": GreedyPlayer(env)}
    for name, player in players.items():
        run.evaluate(name, env, tasks, player, label=f"{name} play", cluster_by="solution")
    if game.model is None:  # it imitates a player that asks random questions and then names a matching object
        games = make_tasks(secrets, "demonstrations", game.num_demonstrations, args.seed)
        demonstrations = run.play("demonstrations", env, games, ImitationPlayer(env, seed=args.seed))
        run.warm_start(demonstrations, game.warm_start_steps, observation_loss=True)
    run.evaluate("before", env, tasks, label="before learning", cluster_by="solution")
    curve = run.learning_curve(references=[*players])
    size = 64 * len(secrets)
    rows = TwentyQuestionsEnv.get_train_dataset(env_config, size=size, seed=args.seed, split="all")
    run.learn(env, rows, callbacks=[curve])
    after = run.evaluate("after", env, tasks, label="after learning", cluster_by="solution")

    curve.draw(after=after.win_rate)
    run.write_transcripts("before", "after")
    run.write_summary(env_config=env_config, secrets=secrets, settings={**vars(game), **args.to_dict()})
    if run.is_main:
        print(f"\n{comparison_table(run.evaluations)}\n\n{closing_words(run, env)}")
    sys.exit(run.phases.status)


def game_config(game: GameOptions) -> dict[str, Any]:
    """Return the environment's configuration; ``demo`` and ``all`` stand for lists."""
    properties = game.properties or (["demo"] if game.objects == ["demo"] else ["all"])
    config: dict[str, Any] = {
        "objects": _choice(game.objects, DEMO_OBJECTS),
        "properties": _choice(properties, DEMO_PROPERTIES),
        "max_steps_per_episode": game.max_steps_per_episode,
        "final_guess": True,
    }
    if game.model is None:
        config["system_prompt"] = ""  # the tiny policy learns the rules by playing
    return config


def make_tasks(secrets: Sequence[str], purpose: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Create tasks that are spread evenly over the secrets, and whose seeds differ between purposes."""
    return [{"solution": secrets[i % len(secrets)], "seed": derive_seed(purpose, seed, i)} for i in range(count)]


def closing_words(run: TrainingRun, env: TwentyQuestionsEnv) -> str:
    """Describe the game and where the files are."""
    return (
        f"{len(env.candidates.objects)} objects, {env.env_config['max_steps_per_episode']} turns; every evaluation is "
        f"on the objects that the policy was trained on. {run.phases.total_seconds:.0f} s in total. "
        f"Everything is in {run.output}."
    )


def _choice(given: Sequence[str], demo: Sequence[str]) -> str | list[str]:
    if list(given) in (["demo"], ["all"]):
        return list(demo) if given[0] == "demo" else "all"
    return list(given)


if __name__ == "__main__":
    main()
