"""Learning curves of SmolLM2-135M-Instruct: before and after training, on several environments and seeds.

    python benchmarks/real_learning.py guessing --seed 1 --output results.jsonl
    python benchmarks/real_learning.py guessing --seed 1 --credit rollout --output results.jsonl

A run evaluates the untrained model, imitates demonstrations, trains with ``GRPOEnvTrainer``, evaluates on the same
held-out tasks, and appends a line to a file: win rates with 95% intervals, the win rate of every training step, and
the CPU time of each phase. The policy after the warm start is kept in the folder with its results, and later runs of
the same lesson and seed start from it; with ``--cold``, nothing is imitated. ``--credit trl`` trains with TRL's
``GRPOTrainer`` and a rollout function written by hand.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import TrainerCallback
from trl import ModelConfig

from agentsgym import GRPOEnvConfig, TrainingRun
from agentsgym.agents.policy.loading import is_slow_in_bfloat16
from agentsgym.evaluation.transcripts import render_transcript
from agentsgym.recipes.scripts import load_policy, quiet_logging
from benchmarks.real_by_hand import train_by_hand
from benchmarks.real_lessons import LESSONS, Lesson

Rows = Sequence[Mapping[str, Any]]
RESULTS = "results.json"  # of the evaluations before training


class StepLog(TrainerCallback):
    """Keeps the metrics of every step."""

    keys = ("win_rate", "reward", "turns/mean", "invalid_turns", "entropy")

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep the metrics, and print them."""
        if logs and "reward" in logs:
            self.steps.append({key: round(float(logs[key]), 4) for key in self.keys if key in logs})
            print(state.global_step, self.steps[-1], f"{time.process_time():.0f} s", flush=True)


class Session:
    """One run of a lesson.

    Attributes:
        found: The results so far.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.lesson, self.options = LESSONS[name], options
        self.start: Path = options.folder / f"{name}-{options.seed}-start"
        self.is_new = options.cold or not self.start.exists()
        models = model_settings("adapters" if self.is_new and not options.cold else options.weights, options.device)
        model, tokenizer = load_policy("smollm2" if self.is_new else str(self.start), models)
        policy = model.to(options.device), tokenizer
        self.run = TrainingRun(policy, training_args(self.lesson, name, options), models)
        config = {**self.lesson.env_config, **({} if options.credit == "turn" else self.lesson.outcome)}
        self.env = self.lesson.env_class(self.run.tokenizer, config)
        sizes = {"size": 4096, "seed": options.seed}, {"size": options.tasks}
        train, held_out = ({**size, **self.lesson.rows} for size in sizes)
        self.rows: Any = self.lesson.env_class.get_train_dataset(config, **train)
        rows: Any = self.lesson.env_class.get_eval_dataset(config, **held_out)
        self.tasks: Rows = rows["task_data"]
        keys = ("seed", "cold", "credit", "weights", "learning_rate")
        chosen = {key: getattr(options, key) for key in keys}
        chosen["discount"] = self.run.args.discount
        where = {"device": device_name(options.device), "computed_in": "bfloat16" if self.run.args.bf16 else "float32"}
        self.found: dict[str, Any] = {"lesson": name, **chosen, **where, "cpu_s": {}, "wall_s": {}}
        self._last = time.process_time(), time.perf_counter()

    def learn(self) -> None:
        """Warm up unless an earlier run did, train, and evaluate."""
        if self.is_new:
            self.evaluate("untrained")
        if self.options.cold:
            self.found["before"] = self.found["untrained"]
        else:
            self.warm_start()
        log = StepLog()
        if self.options.credit == "trl":
            train_by_hand(self.run, self.env, self.rows, log)
        else:
            self.run.learn(self.env, self.rows, callbacks=[log])
        self.found["curve"] = log.steps
        self.split("training")
        self.evaluate("after")

    def warm_start(self) -> None:
        """Imitate the lesson's player, evaluate, and keep the policy; or read the results of an earlier run."""
        if self.is_new:
            lesson, rows = self.lesson, self.rows["task_data"]
            own = [cast("dict[str, Any]", rows[index % len(rows)]) for index in range(lesson.num_demonstrations)]
            player = lesson.player(self.env, self.options.seed)
            demonstrations = self.run.play("demonstrations", self.env, own, player)
            size = 16 if self.options.device == "cuda" else 4
            batch: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 16 // size}
            self.run.warm_start(demonstrations, lesson.imitation_steps, learning_rate=5e-4, **batch)
            self.split("warm start")
            self.evaluate("before")
            run: Any = self.run
            run.model.save_pretrained(self.start)
            run.tokenizer.save_pretrained(self.start)
            kept = {name: self.found[name] for name in ("untrained", "before", "cpu_s", "wall_s")}
            (self.start / RESULTS).write_text(json.dumps(kept))
        self.found |= json.loads((self.start / RESULTS).read_text())

    def evaluate(self, name: str) -> None:
        """Play the held-out tasks, and print the result and three transcripts."""
        with torch.autocast(self.options.device, dtype=torch.bfloat16, enabled=bool(self.run.args.bf16)):
            result = self.run.evaluate(name, self.env, self.tasks)
        self.found[name] = {
            key: [round(value, 4) for value in (one.mean, one.low, one.high)]
            for key in ("win_rate", "reward", "turns")
            if (one := getattr(result, key)) is not None
        }
        self.split("evaluation")
        print(name, self.found[name], flush=True)
        for trajectory in result.trajectories[:3]:
            print(render_transcript(trajectory), flush=True)

    def split(self, phase: str) -> None:
        """Add the seconds of CPU time and of wall-clock time since the last call to a phase."""
        now = time.process_time(), time.perf_counter()
        for clock, start, end in zip(("cpu_s", "wall_s"), self._last, now, strict=True):
            self.found[clock][phase] = round(self.found[clock].get(phase, 0.0) + end - start, 1)
        self._last = now


def device_name(device: str) -> str:
    """Return the name of a GPU, or ``"cpu"``."""
    return torch.cuda.get_device_name() if device == "cuda" else device


def is_bfloat16_fast(device: str) -> bool:
    """Whether the device computes faster in bfloat16 than in float32."""
    return device == "cuda" or not is_slow_in_bfloat16()


def model_settings(weights: str, device: str) -> ModelConfig:
    """Return the settings of the model: float32 if all weights are trained or bfloat16 is slow here, else bfloat16."""
    if weights == "all":
        return ModelConfig(dtype="float32")
    lora: dict[str, Any] = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]}
    return ModelConfig(dtype="bfloat16" if is_bfloat16_fast(device) else "float32", use_peft=True, **lora)


def training_args(lesson: Lesson, name: str, options: argparse.Namespace) -> GRPOEnvConfig:
    """Return the trainer's settings: 32 rollouts per step."""
    batch_size = 32 if options.device == "cuda" else 4
    settings: dict[str, Any] = {
        "seed": options.seed,
        "max_steps": options.steps or lesson.training_steps,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": 32 // batch_size,
        "num_generations": 8,
        "max_turn_tokens": 12,
        "learning_rate": options.learning_rate or lesson.learning_rate,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "bf16": is_bfloat16_fast(options.device),
        "use_cpu": options.device == "cpu",
        "save_strategy": "no",
        "report_to": "none",
        "store_rollouts": True,
        **lesson.training,
    }
    if options.credit == "rollout":
        settings |= {"advantage_estimator": "grpo", "discount": 1.0}
    options.learning_rate = settings["learning_rate"]
    start = "cold-" * options.cold
    run_name = f"{name}-{options.seed}-{start}{options.credit}-{options.weights}-{options.learning_rate}"
    return GRPOEnvConfig(str(options.folder / run_name), **settings)


def main() -> None:
    """Run one lesson, and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lesson", choices=list(LESSONS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="optimizer steps of 32 rollouts each; default: the lesson's")
    parser.add_argument("--learning-rate", type=float, help="default: the lesson's")
    parser.add_argument(
        "--credit", choices=["turn", "rollout", "trl"], default="turn", help="what a reward is credited to"
    )
    parser.add_argument("--cold", action="store_true", help="imitate nothing first")
    parser.add_argument("--weights", choices=["adapters", "all"], default="adapters", help="what is trained")
    parser.add_argument("--tasks", type=int, default=128, help="tasks of each evaluation")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("outputs/real_learning"))
    parser.add_argument("--output", type=Path, help="file to append the results to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    quiet_logging()
    session = Session(options.lesson, options)
    session.learn()
    found = json.dumps(session.found)
    print(found)
    if options.output:
        with options.output.open("a") as file:
            file.write(found + "\n")


if __name__ == "__main__":
    main()
