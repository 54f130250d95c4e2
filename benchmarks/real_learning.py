"""Learning curves of SmolLM2-135M-Instruct: before and after training, on several environments and seeds.

    python benchmarks/real_learning.py guessing --seed 1 --output results.jsonl
    python benchmarks/real_learning.py guessing --seed 1 --credit rollout --output results.jsonl

A run evaluates the untrained model, imitates demonstrations, trains with ``GRPOEnvTrainer``, evaluates on the same
held-out tasks, and appends a line to a file: win rates with 95% intervals, the win rate of every training step, and the
CPU time of each phase.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import TrainerCallback
from trl import ModelConfig

from agentsgym import GRPOEnvConfig, RandomAgent, TrainingRun
from agentsgym.envs.Gymnasium import GymnasiumEnv, RandomPlayer
from agentsgym.envs.PriceList import ImitationPlayer as ShoppingPlayer
from agentsgym.envs.PriceList import PriceListEnv
from agentsgym.envs.TextArena import LegalAgent, TextArenaEnv
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, ImitationPlayer, TwentyQuestionsEnv
from agentsgym.evaluation.transcripts import render_transcript
from agentsgym.recipes.scripts import load_policy, quiet_logging
from benchmarks.real_games import NumberGuessing

if TYPE_CHECKING:
    from agentsgym import MultistepEnv

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What one environment needs to be learned.

    Attributes:
        env_class: The environment.
        env_config: Its configuration.
        rows: The dataset's options.
        player: Builds the player whose episodes are imitated first.
        num_demonstrations: Number of episodes that it plays.
        imitation_steps: Number of optimizer steps of the warm start, of 16 episodes each.
        training: Fields of ``GRPOEnvConfig`` that differ from the common ones.
    """

    env_class: type[MultistepEnv]
    env_config: Mapping[str, Any]
    player: Callable[[Any, int], Any]
    num_demonstrations: int
    imitation_steps: int
    rows: Mapping[str, Any] = field(default_factory=dict[str, Any])
    training: Mapping[str, Any] = field(default_factory=dict[str, Any])


# The model's chat template has no place for tools: the prompt describes them and the format of a call.
TOOLS_PROMPT = (
    "You answer questions about prices. Your tools are price(good), add(a, b) and multiply(a, b). Call a tool "
    'like this: <tool_call>{"name": "price", "arguments": {"good": "egg"}}</tool_call>. '
    "Give the answer as a number alone."
)
OBJECTS = DEMO_OBJECTS[::4]
LESSONS = {
    "guessing": Lesson(
        env_class=NumberGuessing,
        env_config={
            "highest": 100,
            "information_reward": True,
            "max_steps_per_episode": 8,
            "system_prompt": "You are playing a game.",
        },
        player=lambda _, seed: RandomAgent([str(number) for number in range(1, 101)], seed=seed),
        num_demonstrations=160,
        imitation_steps=10,
    ),
    "lake": Lesson(
        env_class=GymnasiumEnv,
        env_config={"id": "FrozenLake-v1", "make_kwargs": {"is_slippery": False}, "max_steps_per_episode": 8},
        rows={"random_maps": True, "map_size": 3},
        player=lambda env, seed: RandomPlayer(env, seed=seed),
        num_demonstrations=160,
        imitation_steps=20,
    ),
    "nim": Lesson(
        env_class=TextArenaEnv,
        env_config={"game": "Nim-v0", "opponent": "random", "seat": 0, "system_prompt": "You are playing a game."},
        player=lambda env, seed: LegalAgent(env, seed=seed),
        num_demonstrations=96,
        imitation_steps=12,
        training={"max_turn_tokens": 8},
    ),
    "prices": Lesson(
        env_class=PriceListEnv,
        env_config={"max_steps_per_episode": 4, "system_prompt": TOOLS_PROMPT},
        player=lambda env, seed: ShoppingPlayer(env, noise=0.5, seed=seed),
        num_demonstrations=320,
        imitation_steps=20,
        training={"max_turn_tokens": 64},
    ),
    "twenty_questions": Lesson(
        env_class=TwentyQuestionsEnv,
        env_config={
            "objects": list(OBJECTS),
            "properties": list(DEMO_PROPERTIES),
            "max_steps_per_episode": 5,
            "final_guess": True,
            "system_prompt": f"Find out which of these I am thinking of: {', '.join(OBJECTS)}.",
        },
        rows={"split": "all"},
        player=lambda env, seed: ImitationPlayer(env, seed=seed),
        num_demonstrations=1440,
        imitation_steps=90,
        training={"max_turn_tokens": 16, "advantage_estimator": "gigpo"},
    ),
}


class StepLog(TrainerCallback):
    """Keeps the metrics of every step."""

    keys = ("win_rate", "reward", "turns/mean", "invalid_turns", "entropy")

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep the metrics, and print them."""
        if logs and "win_rate" in logs:
            self.steps.append({key: round(float(logs[key]), 4) for key in self.keys if key in logs})
            print(state.global_step, self.steps[-1], f"{time.process_time():.0f} s", flush=True)


def learn(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one lesson, and return its results."""
    lesson = LESSONS[name]
    if options.weights == "adapters":
        models = ModelConfig(
            dtype="bfloat16",
            use_peft=True,
            lora_r=16,
            lora_alpha=32,
            lora_dropout=0.0,
            lora_target_modules=["all-linear"],
        )
    else:
        models = ModelConfig(dtype="float32")
    args = training_args(lesson, options)
    run = TrainingRun(load_policy("smollm2", models), args, models)
    env = lesson.env_class(run.tokenizer, {**lesson.env_config})
    rows: Any = lesson.env_class.get_train_dataset(
        {**lesson.env_config}, **{"size": 4096, "seed": options.seed, **lesson.rows}
    )
    held_out: Any = lesson.env_class.get_eval_dataset({**lesson.env_config}, **{"size": options.tasks, **lesson.rows})
    tasks: Rows = held_out["task_data"][: options.tasks]
    found: dict[str, Any] = {"lesson": name, **{key: getattr(options, key) for key in ("seed", "credit", "weights")}}
    clock = Clock()
    evaluate(run, "untrained", env, tasks, found)
    clock.split("evaluation")
    own = [cast("dict[str, Any]", rows[index % len(rows)]["task_data"]) for index in range(lesson.num_demonstrations)]
    demonstrations = run.play("demonstrations", env, own, lesson.player(env, options.seed))
    batch: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    run.warm_start(demonstrations, lesson.imitation_steps, learning_rate=5e-4, **batch)
    clock.split("warm start")
    evaluate(run, "before", env, tasks, found)
    clock.split("evaluation")
    log = StepLog()
    run.learn(env, rows, callbacks=[log])
    clock.split("training")
    evaluate(run, "after", env, tasks, found)
    clock.split("evaluation")
    return {**found, "curve": log.steps, "cpu_s": clock.seconds}


def training_args(lesson: Lesson, options: argparse.Namespace) -> GRPOEnvConfig:
    """Return the trainer's settings: 32 rollouts per step."""
    settings: dict[str, Any] = {
        "seed": options.seed,
        "max_steps": options.steps,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "num_generations": 8,
        "max_turn_tokens": 12,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "bf16": True,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "store_rollouts": True,
        **lesson.training,
    }
    if options.credit == "rollout":
        settings["advantage_estimator"] = "grpo"
    return GRPOEnvConfig(str(options.folder), **settings)


def evaluate(run: TrainingRun, name: str, env: MultistepEnv, tasks: Rows, found: dict[str, Any]) -> None:
    """Play the held-out tasks, and add the result."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = run.evaluate(name, env, tasks)
    found[name] = {
        key: [round(value, 4) for value in (one.mean, one.low, one.high)]
        for key in ("win_rate", "reward", "turns")
        if (one := getattr(result, key)) is not None
    }
    print(name, found[name], flush=True)
    for trajectory in result.trajectories[:3]:
        print(render_transcript(trajectory), flush=True)


class Clock:
    """CPU seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.process_time()

    def split(self, phase: str) -> None:
        """Add the time since the last call to a phase."""
        now = time.process_time()
        self.seconds[phase] = round(self.seconds.get(phase, 0.0) + now - self._last, 1)
        self._last = now


def main() -> None:
    """Run one lesson, and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lesson", choices=list(LESSONS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of 32 rollouts each")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--credit", choices=["turn", "rollout"], default="turn", help="what a reward is credited to")
    parser.add_argument("--weights", choices=["adapters", "all"], default="adapters", help="what is trained")
    parser.add_argument("--tasks", type=int, default=128, help="tasks of each evaluation")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("outputs/real_learning"))
    parser.add_argument("--output", type=Path, help="file to append the results to")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    quiet_logging()
    found = json.dumps(learn(options.lesson, options))
    print(found)
    if options.output:
        with options.output.open("a") as file:
            file.write(found + "\n")


if __name__ == "__main__":
    main()
