"""Train a small language model to call tools, through the same code as a large one.

    python examples/tools.py                          # an embedded policy, a few minutes on a laptop CPU
    python examples/tools.py --model NAME_OR_PATH --max_turn_tokens 512
    python examples/tools.py --config run.yaml        # every field of GRPOEnvConfig and of TRL's ModelConfig

The questions are those of the price list: the answer takes one or two look-ups and often a calculation, each by a call.
The embedded policy first imitates a player that does something random in every other turn, so that it has seen what
calls look like; reinforcement learning then finds out which of them pay. It writes to ``outputs/tools``:
``summary.json``, ``learning_curve.png``, transcripts of the same tasks before and after training, and ``model/``.
Ctrl-C and SIGTERM end training early and keep the policy as it is.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging
from trl import ModelConfig, TrlParser, get_peft_config

from agentsgym import (
    Agent,
    GRPOEnvConfig,
    GRPOEnvTrainer,
    LearningCurve,
    PolicyAgent,
    evaluate,
    imitate,
    tiny_policy,
)
from agentsgym.envs.PriceList import ImitationPlayer, PriceListEnv, RandomPlayer, ReferencePlayer
from agentsgym.evaluation.metrics import Evaluation
from agentsgym.reports.tables import comparison_table
from agentsgym.seeding import derive_seed
from agentsgym.training.imitate import tiny_imitation_config
from agentsgym.training.scripts import LossBar, Phases, episodes_bar, load_policy, write_transcripts

# Defaults for the embedded policy.
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
DEFAULTS: dict[str, Any] = {
    "output_dir": "outputs/tools",
    "logging_steps": 20,
    "save_strategy": "no",
    "report_to": "none",
    "dataloader_pin_memory": torch.accelerator.is_available(),
}


@dataclass
class TaskArguments:
    """The questions, the policy, and how much to play."""

    model: str | None = field(default=None, metadata={"help": "Name or path; by default the embedded tiny policy."})
    kinds: list[str] = field(
        default_factory=lambda: ["price", "sum", "product"], metadata={"help": "Some of price, sum, product."}
    )
    max_price: int = field(default=9, metadata={"help": "The highest price."})
    max_steps_per_episode: int = field(default=6, metadata={"help": "Turns of an episode at most."})
    num_tasks: int = field(default=600, metadata={"help": "Questions of each evaluation."})
    num_train_tasks: int = field(default=20_000, metadata={"help": "Questions to train on."})
    num_demonstrations: int = field(default=8000, metadata={"help": "Episodes that the tiny policy imitates first."})
    noise: float = field(default=0.5, metadata={"help": "Share of random turns in what it imitates."})
    warm_start_steps: int = field(default=3000, metadata={"help": "Optimizer steps of that imitation."})


def main() -> None:
    """Evaluate, imitate, train, evaluate again, and print the comparison."""
    task, args, model_config = parse_arguments()
    logging.basicConfig(level=logging.WARNING)
    transformers_logging.set_verbosity_error()
    run = Run(task, args, model_config)
    run.evaluate("random", RandomPlayer(run.env, seed=args.seed))
    run.evaluate("optimal", ReferencePlayer(run.env, seed=args.seed))
    if task.model is None:
        run.evaluate("untrained", run.policy())
        run.warm_start()
    run.evaluate("before", run.policy())
    curve = run.learning_curve()
    if not run.phases.interrupted:
        run.learn(curve)
    run.evaluate("after", run.policy())
    curve.draw(after=run.evaluations["after"].win_rate)
    run.save()
    print(f"\n{comparison_table(run.evaluations)}\n\n{run.closing_words()}")
    sys.exit(run.phases.status)


def parse_arguments() -> tuple[TaskArguments, GRPOEnvConfig, ModelConfig]:
    """Read the command line and ``--config``; the defaults depend on whether the tiny policy is trained."""
    dataclasses: Any = (TaskArguments, GRPOEnvConfig, ModelConfig)
    parser: Any = TrlParser(dataclasses)
    parser.set_defaults(**DEFAULTS)
    task, _, model_config = parser.parse_args_and_config()
    if task.model is None and model_config.model_name_or_path is None:
        torch.set_num_threads(1)  # a second thread gains nothing on so small a model
        parser.set_defaults(**TINY_DEFAULTS)
    task, args, model_config = parser.parse_args_and_config()
    task.model = task.model or model_config.model_name_or_path
    return task, args, model_config


class Run:
    """One run of the example: the environment, the policy, what was measured, and the clock."""

    def __init__(self, task: TaskArguments, args: GRPOEnvConfig, model_config: ModelConfig) -> None:
        self.task, self.args, self.model_config = task, args, model_config
        self.output = Path(args.output_dir or DEFAULTS["output_dir"])
        self.evaluations: dict[str, Evaluation] = {}
        self.phases = Phases()
        self.env_config: dict[str, Any] = {
            "kinds": task.kinds,
            "max_price": task.max_price,
            "max_steps_per_episode": task.max_steps_per_episode,
        }
        if task.model is None:
            self.env_config["system_prompt"] = ""  # the tiny policy learns what to do by doing it
            self.model, self.tokenizer = tiny_policy(PriceListEnv(env_config=self.env_config), seed=args.seed)
        else:
            self.model, self.tokenizer = load_policy(task.model, model_config, trust_remote_code=args.trust_remote_code)
        self.env = PriceListEnv(self.tokenizer, self.env_config)
        self.tasks = self.env.tasks(task.num_tasks, seed=args.seed, part="eval")

    def policy(self) -> PolicyAgent:
        """The policy as it is now, sampled at temperature 1 without top-k or top-p."""
        seed = derive_seed("evaluation", self.args.seed)
        return PolicyAgent(self.model, self.tokenizer, seed=seed, max_turn_tokens=self.args.max_turn_tokens)

    def evaluate(self, name: str, agent: Agent) -> None:
        """Play the evaluation's tasks, the same for every player."""
        with self.phases.measure(name), episodes_bar(name, len(self.tasks)) as on_finish:
            self.evaluations[name] = evaluate(self.env, agent, self.tasks, max_concurrent=256, on_finish=on_finish)

    def warm_start(self) -> None:
        """Imitate a player that knows what to do and often does something else."""
        count = self.task.num_demonstrations
        with self.phases.measure("demonstrations"), episodes_bar("demonstrations", count) as on_finish:
            demonstrations = self.env.rollout(
                self.env.tasks(count, seed=derive_seed("demonstrations", self.args.seed)),
                ImitationPlayer(self.env, seed=self.args.seed, noise=self.task.noise),
                max_concurrent=256,
                on_finish=on_finish,
            )
        config = tiny_imitation_config(self.task.warm_start_steps, seed=self.args.seed, disable_tqdm=True)
        bar = LossBar("warm start", config.max_steps)
        with self.phases.measure("warm start"), self.phases.interruptible(), bar:
            imitate(self.model, demonstrations, self.tokenizer, config, callbacks=[bar])

    def learning_curve(self) -> LearningCurve:
        """The plot that is drawn during training."""
        win_rates = {name: one.win_rate for name, one in self.evaluations.items() if one.win_rate}
        before = win_rates.pop("before", None)
        references = {name: win_rates[name] for name in ("random", "optimal") if name in win_rates}
        return LearningCurve(self.output / "learning_curve.png", before=before, references=references)

    def learn(self, curve: LearningCurve) -> None:
        """Train with GRPO and draw the learning curve."""
        if self.args.beta or self.args.use_vllm:  # both load from a path, so the policy must be saved there
            self._save_policy("start")
            self.model = AutoModelForCausalLM.from_pretrained(self.output / "start")
        trainer = GRPOEnvTrainer(
            self.model,
            self.env,
            self.args,
            train_dataset=PriceListEnv.get_train_dataset(
                self.env_config, size=self.task.num_train_tasks, seed=self.args.seed
            ),
            callbacks=[curve],
            peft_config=get_peft_config(self.model_config) if self.model_config.use_peft else None,
        )
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        with self.phases.measure("reinforcement learning"), self.phases.interruptible():
            trainer.train(resume_from_checkpoint=self.args.resume_from_checkpoint)
        trainer.close()
        curve.close()
        if self.model_config.use_peft:
            adapted: Any = trainer.model
            self.model = adapted.merge_and_unload()

    def save(self) -> None:
        """Write the policy, the summary and the transcripts."""
        self._save_policy("model")
        for name in ("before", "after"):
            write_transcripts(self.output / f"transcripts_{name}.txt", self.evaluations[name].trajectories)
        summary = {name: evaluation.as_dict() for name, evaluation in self.evaluations.items()} | {
            "fraction_of_optimal": self.fraction_of_optimal(),
            "seconds": self.phases.seconds,
            "env_config": self.env_config,
            "cpu_seconds": round(time.process_time(), 1),
            "seed": self.args.seed,
            "interrupted": self.phases.interrupted,
            "settings": vars(self.task),
        }
        text = json.dumps(summary, indent=2, default=str)
        (self.output / "summary.json").write_text(text + "\n", encoding="utf-8")

    def fraction_of_optimal(self) -> float:
        """What the policy earns after learning, as a share of what optimal play earns."""
        after, optimal = (self.evaluations[name].reward for name in ("after", "optimal"))
        return after.mean / optimal.mean if after and optimal else 0.0

    def closing_words(self) -> str:
        """Say what was reached and where the files are."""
        return (
            f"{self.fraction_of_optimal():.0%} of optimal, on questions and prices that were not trained on. "
            f"{sum(self.phases.seconds.values()):.0f} s in all. "
            f"Everything is in {self.output}: summary.json, learning_curve.png, transcripts_*.txt, model/"
        )

    def _save_policy(self, folder: str) -> None:
        self.model.save_pretrained(self.output / folder)
        self.tokenizer.save_pretrained(self.output / folder)


if __name__ == "__main__":
    main()
