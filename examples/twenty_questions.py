"""Train a small language model to play Twenty Questions, through the same code as a large one.

    python examples/twenty_questions.py                        # an embedded policy, a few minutes on a laptop CPU
    python examples/twenty_questions.py --model NAME_OR_PATH --objects all --max_steps_per_episode 20
    python examples/twenty_questions.py --config run.yaml      # every field of GRPOEnvConfig and of TRL's ModelConfig

It writes to ``outputs/twenty_questions``: ``summary.json``, ``learning_curve.png``, the transcripts of the same tasks
before and after training, and ``model/``. Ctrl-C and SIGTERM end training early and keep the policy as it is.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging
from trl import ModelConfig, TrlParser, get_peft_config

from agentsgym import (
    Agent,
    ConfigError,
    GRPOEnvConfig,
    GRPOEnvTrainer,
    LearningCurve,
    PolicyAgent,
    evaluate,
    imitate,
    tiny_policy,
)
from agentsgym.envs.TwentyQuestions import (
    DEMO_OBJECTS,
    DEMO_PROPERTIES,
    GreedyPlayer,
    ImitationPlayer,
    RandomPlayer,
    TwentyQuestionsEnv,
)
from agentsgym.evaluation.metrics import Evaluation
from agentsgym.reports.tables import comparison_table
from agentsgym.seeding import derive_seed
from agentsgym.training.imitate import tiny_imitation_config
from agentsgym.training.scripts import LossBar, Phases, episodes_bar, load_policy, write_transcripts

# Defaults for the embedded policy; docs/results.md shows what they lead to.
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
DEFAULTS: dict[str, Any] = {
    "output_dir": "outputs/twenty_questions",
    "logging_steps": 20,
    "save_strategy": "no",
    "report_to": "none",
    "dataloader_pin_memory": torch.accelerator.is_available(),
}
# Fields of ModelConfig that the trainer does not support yet.
REFUSED = ("load_in_8bit", "load_in_4bit")


@dataclass
class GameArguments:
    """The game, the policy, and how much to play."""

    model: str | None = field(default=None, metadata={"help": "Name or path; by default the embedded tiny policy."})
    objects: list[str] = field(default_factory=lambda: ["demo"], metadata={"help": "'demo', 'all', or names."})
    properties: list[str] | None = field(
        default=None, metadata={"help": "'demo', 'all', or keys; by default 'demo' for the demo's objects, else 'all'."}
    )
    max_steps_per_episode: int = field(default=7, metadata={"help": "Turns of a game at most."})
    num_games: int = field(default=1056, metadata={"help": "Games of each evaluation, spread evenly over the objects."})
    num_demonstrations: int = field(default=16_000, metadata={"help": "Games that the tiny policy imitates first."})
    warm_start_steps: int = field(default=3500, metadata={"help": "Optimizer steps of that imitation."})


def main() -> None:
    """Evaluate, imitate, train, evaluate again, and print the comparison."""
    game, args, model_config = parse_arguments()
    logging.basicConfig(level=logging.WARNING)
    transformers_logging.set_verbosity_error()
    run = Run(game, args, model_config)
    evaluations = {
        "random": run.evaluate("random play", RandomPlayer(run.env, seed=args.seed)),
        "greedy": run.evaluate("greedy play", GreedyPlayer(run.env)),
    }
    if game.model is None:
        run.warm_start()
        run.save_policy()
    evaluations["before"] = run.evaluate("before learning", run.policy())
    curve = run.learning_curve(evaluations)
    if not run.phases.interrupted:
        run.learn(curve)
    run.save_policy()
    evaluations["after"] = run.evaluate("after learning", run.policy())
    curve.draw(after=evaluations["after"].win_rate)
    run.save_summary(evaluations)
    print(f"\n{comparison_table(evaluations)}\n\n{run.closing_words()}")
    sys.exit(run.phases.status)


def parse_arguments() -> tuple[GameArguments, GRPOEnvConfig, ModelConfig]:
    """Read the command line and ``--config``; the defaults depend on whether the tiny policy is trained."""
    dataclasses: Any = (GameArguments, GRPOEnvConfig, ModelConfig)
    parser: Any = TrlParser(dataclasses)
    parser.set_defaults(**DEFAULTS)
    game, _, model_config = parser.parse_args_and_config()
    if game.model is None and model_config.model_name_or_path is None:
        torch.set_num_threads(1)  # a second thread gains nothing on so small a model
        parser.set_defaults(**TINY_DEFAULTS)
    game, args, model_config = parser.parse_args_and_config()
    for name in REFUSED:
        if getattr(model_config, name):
            raise ConfigError(f"--{name} is not supported yet: the trainer takes a model that is not quantized")
    if game.model and model_config.model_name_or_path:
        raise ConfigError("--model and --model_name_or_path are the same: give one of them")
    game.model = game.model or model_config.model_name_or_path
    return game, args, model_config


class Run:
    """One run of the example: the environment, the policy, and the clock."""

    def __init__(self, game: GameArguments, args: GRPOEnvConfig, model_config: ModelConfig) -> None:
        self.game, self.args, self.model_config = game, args, model_config
        self.output = Path(args.output_dir or DEFAULTS["output_dir"])
        self.phases = Phases()
        self.env_config = {
            "objects": _choice(game.objects, DEMO_OBJECTS),
            "properties": _choice(
                game.properties or (["demo"] if game.objects == ["demo"] else ["all"]), DEMO_PROPERTIES
            ),
            "max_steps_per_episode": game.max_steps_per_episode,
            "final_guess": True,
        }
        if game.model is None:
            self.env_config["system_prompt"] = ""  # the tiny policy learns the rules by playing
            text_env = TwentyQuestionsEnv(env_config=self.env_config)
            self.model, self.tokenizer = tiny_policy(text_env, seed=args.seed)
        else:
            self.model, self.tokenizer = load_policy(game.model, model_config, trust_remote_code=args.trust_remote_code)
        self.env = TwentyQuestionsEnv(self.tokenizer, self.env_config)
        self.secrets = list(self.env.candidates.objects)
        self.tasks = self._tasks("evaluation", game.num_games)

    def policy(self) -> PolicyAgent:
        """The policy as it is now, sampled at temperature 1 without top-k or top-p."""
        seed = derive_seed("evaluation", self.args.seed)
        return PolicyAgent(self.model, self.tokenizer, seed=seed, max_turn_tokens=self.args.max_turn_tokens)

    def evaluate(self, label: str, agent: Agent) -> Evaluation:
        """Play the evaluation's tasks, the same for every player."""
        with self.phases.measure(label), episodes_bar(label, len(self.tasks), unit="game") as on_finish:
            return evaluate(self.env, agent, self.tasks, cluster_by="solution", max_concurrent=256, on_finish=on_finish)

    def warm_start(self) -> None:
        """Imitate a player that asks at random and then names an object that fits."""
        count = self.game.num_demonstrations
        with self.phases.measure("demonstrations"), episodes_bar("demonstrations", count, unit="game") as on_finish:
            demonstrations = self.env.rollout(
                self._tasks("demonstrations", count),
                ImitationPlayer(self.env, seed=self.args.seed),
                max_concurrent=256,
                on_finish=on_finish,
            )
        config = tiny_imitation_config(self.game.warm_start_steps, seed=self.args.seed, disable_tqdm=True)
        bar = LossBar("warm start", config.max_steps)
        with self.phases.measure("warm start"), self.phases.interruptible(), bar:
            imitate(self.model, demonstrations, self.tokenizer, config, observation_loss=True, callbacks=[bar])

    def learning_curve(self, evaluations: dict[str, Evaluation]) -> LearningCurve:
        """The plot that is drawn during training."""
        win_rates = {name: evaluation.win_rate for name, evaluation in evaluations.items() if evaluation.win_rate}
        before = win_rates.pop("before", None)
        return LearningCurve(self.output / "learning_curve.png", before=before, references=win_rates)

    def learn(self, curve: LearningCurve) -> None:
        """Train with GRPO and draw the learning curve."""
        if self.args.beta or self.args.use_vllm:  # both load from a path, so the policy must be saved there
            self.save_policy("start")
            self.model = AutoModelForCausalLM.from_pretrained(self.output / "start")
        trainer = GRPOEnvTrainer(
            self.model,
            self.env,
            self.args,
            train_dataset=TwentyQuestionsEnv.get_train_dataset(
                self.env_config, size=64 * len(self.secrets), seed=self.args.seed, split="all"
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

    def save_policy(self, folder: str = "model") -> None:
        """Write the policy as it is now."""
        self.model.save_pretrained(self.output / folder)
        self.tokenizer.save_pretrained(self.output / folder)

    def save_summary(self, evaluations: dict[str, Evaluation]) -> None:
        """Write the summary and the transcripts."""
        for name in ("before", "after"):
            write_transcripts(self.output / f"transcripts_{name}.txt", evaluations[name].trajectories)
        summary = {name: evaluation.as_dict() for name, evaluation in evaluations.items()} | {
            "seconds": self.phases.seconds,
            "env_config": self.env_config,
            "secrets": self.secrets,
            "seed": self.args.seed,
            "interrupted": self.phases.interrupted,
            "settings": {**vars(self.game), **_changed_settings(self.args)},
        }
        text = json.dumps(summary, indent=2, default=str)
        (self.output / "summary.json").write_text(text + "\n", encoding="utf-8")

    def closing_words(self) -> str:
        """Say what was played and where the files are."""
        return (
            f"{len(self.secrets)} objects, {self.env_config['max_steps_per_episode']} turns; every evaluation is on "
            f"the objects that the policy was trained on. {sum(self.phases.seconds.values()):.0f} s in all. "
            f"Everything is in {self.output}: summary.json, learning_curve.png, transcripts_*.txt, model/"
        )

    def _tasks(self, purpose: str, count: int) -> list[dict[str, Any]]:
        return [
            {"solution": self.secrets[i % len(self.secrets)], "seed": derive_seed(purpose, self.args.seed, i)}
            for i in range(count)
        ]


def _choice(given: Sequence[str], demo: Sequence[str]) -> str | list[str]:
    if list(given) in (["demo"], ["all"]):
        return list(demo) if given[0] == "demo" else "all"
    return list(given)


def _changed_settings(args: GRPOEnvConfig) -> dict[str, Any]:
    """Find the settings that differ from the defaults of GRPOEnvConfig."""
    default = GRPOEnvConfig(output_dir=args.output_dir).to_dict()
    return {key: value for key, value in args.to_dict().items() if value != default.get(key)}


if __name__ == "__main__":
    main()
