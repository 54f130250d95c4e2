"""A training step: what trimming micro-batches to their own length saves, and what the trainer's own work costs.

Padding: a generation batch whose rows are 1 to 4 times as long as the shortest; loss and backward of all its
micro-batches, CPU time. TRL pads every row to the longest of the generation batch. Here each micro-batch is trimmed to
its own columns, and rows of one optimizer step stand with rows of like length.

Own work: everything that is neither playing nor scoring nor TRL's loss (layout, advantages, collation, metrics), as a
share of whole training steps of Twenty Questions.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from statistics import median
from typing import Any, cast

import torch
from transformers import PrinterCallback
from trl import GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from agentsgym import GRPOEnvConfig, GRPOEnvTrainer, StopReason, Trajectory, Turn
from agentsgym.batch.layouts import trajectory_rows
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, TwentyQuestionsEnv
from agentsgym.tiny import tiny_policy
from agentsgym.training._trl import TRLInterface
from agentsgym.training.loss import loss_inputs, regroup_rows
from agentsgym.training.metrics.loss import LossStatistics
from agentsgym.training.tensors.token_batch import TokenBatch

NUM_ROWS, LONGEST = 32, 512
TURN_TOKENS = 16  # of which half are the agent's
ENV_CONFIG: dict[str, Any] = {
    "objects": list(DEMO_OBJECTS),
    "properties": list(DEMO_PROPERTIES),
    "max_steps_per_episode": 7,
    "error_allowance": 7,  # a policy that knows nothing plays all turns
}


def trainer_of(folder: str, hidden_size: int, num_layers: int, **changes: Any) -> GRPOEnvTrainer:
    """A trainer of Twenty Questions with a policy of that size."""
    text_env = TwentyQuestionsEnv(env_config=ENV_CONFIG)
    model, tokenizer = tiny_policy(text_env, hidden_size=hidden_size, num_layers=num_layers, seed=0)
    values: dict[str, Any] = {
        "output_dir": folder,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_turn_tokens": 12,
        "num_generations": 8,
    }
    args = GRPOEnvConfig(**{**values, **changes})
    env = TwentyQuestionsEnv(tokenizer, ENV_CONFIG)
    return GRPOEnvTrainer(model, env, args, train_dataset=TwentyQuestionsEnv.get_train_dataset(ENV_CONFIG))


def policy_of(trainer: GRPOEnvTrainer) -> Any:
    """The model in training, whose type TRL leaves open."""
    return trainer.model


def ragged_rollouts(num_rows: int, longest: int, vocabulary_size: int) -> list[Trajectory]:
    """Rollouts of random tokens, their lengths drawn evenly from a quarter of the longest to the longest."""
    generator = random.Random(0)
    lengths = [longest // 4, longest, *(generator.randint(longest // 4, longest) for _ in range(num_rows - 2))]
    half = TURN_TOKENS // 2
    return [
        Trajectory(
            token_ids=[generator.randrange(6, vocabulary_size) for _ in range(length)],
            turns=[
                Turn(start=start, stop=start + half, reward=0.0)
                for start in range(half, length - half + 1, TURN_TOKENS)
            ],
            messages=[],
            final_reward=0.0,
            stop_reason=StopReason.DONE,
        )
        for length in lengths
    ]


def padded_loss(trainer: GRPOEnvTrainer, batch: dict[str, Any]) -> torch.Tensor:
    """TRL's loss on the micro-batch as TRL would have it: as wide as the generation batch."""
    return GRPOTrainer.compute_loss(trainer, trainer.model, loss_inputs(batch, 1, batch["attention_mask"].shape[1]))


def trimmed_loss(trainer: GRPOEnvTrainer, batch: dict[str, Any]) -> torch.Tensor:
    """This trainer's."""
    return trainer.compute_loss(trainer.model, batch)


def seconds_of(trainer: GRPOEnvTrainer, batches: list[dict[str, Any]], loss: Callable[..., torch.Tensor]) -> float:
    """CPU time of loss and backward over all micro-batches."""
    policy_of(trainer).zero_grad()
    start = time.process_time()
    for batch in batches:
        loss(trainer, batch).backward()
    return time.process_time() - start


def gradient_of(
    trainer: GRPOEnvTrainer, batches: list[dict[str, Any]], loss: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """What all micro-batches together leave, (number of weights,)."""
    seconds_of(trainer, batches, loss)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy_of(trainer).parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients])


def measure_padding(size: int, repetitions: int, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """Compare micro-batches of ``size`` rows."""
    steps = NUM_ROWS // size
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(
            folder, hidden_size, num_layers, per_device_train_batch_size=size, gradient_accumulation_steps=steps
        )
        policy_of(trainer).train()
        trainer.current_gradient_accumulation_steps = steps
        rollouts = ragged_rollouts(NUM_ROWS, LONGEST, policy_of(trainer).config.vocab_size)
        rows = [row for index, rollout in enumerate(rollouts) for row in trajectory_rows(index, rollout)]
        tokens = TokenBatch.stack(rollouts, rows, pad_token_id=0)
        mask = tokens.agent_token_mask([True] * NUM_ROWS)
        batch: dict[str, Any] = {
            "prompt_completion_ids": tokens.ids,
            "attention_mask": tokens.attention_mask,
            "agent_token_mask": mask,
            "advantages": torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) * mask,
            "turn_index": tokens.turn_index,
            "num_items_in_batch": mask.sum(),
        }
        torch.manual_seed(0)
        shuffled: Any = split_tensor_dict(cast("Any", shuffle_sequence_dict(batch)), steps)
        ways = {
            "padded": (shuffled, padded_loss),
            "trimmed": (shuffled, trimmed_loss),
            "sorted": (
                regroup_rows(shuffled, trainer.args, has_aux_loss=TRLInterface(trainer).has_aux_loss, shares=False),
                trimmed_loss,
            ),
        }
        gradients = {name: gradient_of(trainer, *way) for name, way in ways.items()}  # warms up, too
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repetitions):  # taken in turn, so that what else the machine does hits all of them
            for name, way in ways.items():
                times[name].append(seconds_of(trainer, *way))
    seconds = {name: median(values) for name, values in times.items()}
    return {
        "micro_batch": size,
        **{f"{name}_s": round(value, 3) for name, value in seconds.items()},
        "trimmed_ratio": round(seconds["padded"] / seconds["trimmed"], 2),
        "sorted_ratio": round(seconds["padded"] / seconds["sorted"], 2),
        "largest_gradient_gap": max(
            float((gradients["padded"] - gradients[name]).abs().max()) for name in ("trimmed", "sorted")
        ),
    }


class Stopwatch:
    """CPU time spent inside functions, by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def around(self, owner: Any, name: str, label: str) -> None:
        """Time every call of ``owner.name`` from now on."""
        function = getattr(owner, name)

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[label] += time.process_time() - start

        setattr(owner, name, timed)


def measure_own_work(num_steps: int, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """The fraction of a run's CPU time that is neither playing, scoring, the loss, backward nor the optimizer."""
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(
            folder,
            hidden_size,
            num_layers,
            per_device_train_batch_size=64,
            max_steps=num_steps,
            num_iterations=2,
            logging_steps=1,
            advantage_estimator="gigpo",
        )
        trainer.remove_callback(PrinterCallback)
        watch.around(trainer, "_generate_and_score_completions", "generation")
        watch.around(trainer.generator, "generate", "play")
        watch.around(trainer, "_token_logprobs", "logprobs")
        watch.around(LossStatistics, "update", "update")
        watch.around(LossStatistics, "metrics", "metrics")
        watch.around(trainer, "_prepare_inputs", "prepare")
        watch.around(trainer, "compute_loss", "loss")
        watch.around(GRPOTrainer, "compute_loss", "trl_loss")
        start = time.process_time()
        trainer.train()
        whole = time.process_time() - start
    seconds = watch.seconds
    own = {
        "layout, advantages, collation, metrics": seconds["generation"] - seconds["play"] - seconds["logprobs"],
        "micro-batches": seconds["prepare"] - seconds["generation"],
        "around the loss": seconds["loss"] - seconds["trl_loss"] + seconds["update"] + seconds["metrics"],
    }
    return {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_steps": num_steps,
        "step_s": round(whole / num_steps, 4),
        "own_s": {name: round(value / num_steps, 5) for name, value in own.items()},
        "own_fraction": round(sum(own.values()) / whole, 4),
    }


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [(32, 1)] if options.quick else [(64, 2), (256, 4)]
    result = {
        "padding": [measure_padding(size, 1 if options.quick else 5, *sizes[-1]) for size in (1, 4)],
        "own_work": [measure_own_work(2 if options.quick else 20, *size) for size in sizes],
    }
    print(json.dumps(result) if options.json else table(result))


def table(result: dict[str, Any]) -> str:
    """What a person reads."""
    lines = ["micro-batch   padded s   trimmed s   ratio   sorted s   ratio   largest gap of a gradient"]
    lines += [
        f"{row['micro_batch']:11} {row['padded_s']:10} {row['trimmed_s']:11} {row['trimmed_ratio']:7}"
        f" {row['sorted_s']:10} {row['sorted_ratio']:7}   {row['largest_gradient_gap']:.1e}"
        for row in result["padding"]
    ]
    lines.append("hidden x layers   step s   own fraction   own work, s a step")
    lines += [
        f"{row['hidden_size']:6} x {row['num_layers']:<6} {row['step_s']:8} {row['own_fraction']:14.1%}   "
        + ", ".join(f"{name} {value}" for name, value in row["own_s"].items())
        for row in result["own_work"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
