"""A whole training step with a long prompt: prefixes shared, not shared, and TRL with a rollout function by hand.

Four task groups of 8 rollouts of four turns, in micro-batches of 8 rows, of an assistant whose prompt is a catalog of a
thousand tokens; a Llama of SmolLM2-135M's shape with random weights, in float32, on one thread. By hand means to
generate from the whole history at each turn, with TRL's ``GRPOTrainer``. CPU time of a step, rollouts included: of
minutes, so that the first one of a process is as good as any; the ways alternate.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# transformers and TRL leave parts of their signatures untyped.

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from agentsgym import GRPOEnvConfig, GRPOEnvTrainer, MultistepEnv
from agentsgym.interop import prompt_dataset
from agentsgym.testing import chat_tokenizer
from benchmarks.gpu_steps import StepClock
from benchmarks.real_by_hand import SHARED_SETTINGS, ByHand, total_reward
from benchmarks.record import median, record

RESULTS: Final = Path(__file__).parent / "results"
WAYS: Final = ("auto", "off", "by_hand")
GROUP, ANSWER_TOKENS = 8, 24


class Size(NamedTuple):
    """How large the model and a step are."""

    layers: int
    width: int = 576
    vocabulary: int = 49_152
    groups: int = 4


class Catalog(MultistepEnv):
    """Looks up what the agent writes in a catalog that stands in the prompt; a token is a character."""

    default_config: ClassVar = {"max_steps_per_episode": 4}

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "turn": 0, "seed": task_data["seed"]}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        draw = random.Random(f"{state['seed']} {step}")
        return "".join(f"{draw.randrange(10**6):06} {draw.randrange(100):02}\n" for _ in range(3 if step else 100))

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        turn = state["turn"] + 1
        return {**state, "turn": turn}, len({*action}) / 1000, turn == 4, {}


def step_seconds(way: str, size: Size) -> float:
    """Train one step, and return its CPU time."""
    torch.manual_seed(0)
    tokenizer: Any = chat_tokenizer("chatml")
    sizes: dict[str, Any] = {"hidden_size": size.width, "intermediate_size": size.width * 8 // 3}
    sizes |= {"num_hidden_layers": size.layers, "num_attention_heads": 9, "num_key_value_heads": 3}
    sizes |= {"vocab_size": size.vocabulary, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    clock, env = StepClock("cpu"), Catalog(tokenizer)
    rows = Dataset.from_list([{"task_data": {"seed": seed}} for seed in range(size.groups)])
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOEnvConfig(
            folder, max_steps=1, per_device_train_batch_size=GROUP, gradient_accumulation_steps=size.groups,
            num_generations=GROUP, max_turn_tokens=ANSWER_TOKENS, max_completion_length=2000, learning_rate=1e-7,
            shared_prefix="off" if way == "off" else "auto", use_cpu=True, bf16=False, report_to="none",
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        if way == "by_hand":
            given = {name: getattr(args, name) for name in SHARED_SETTINGS}
            trl_args = GRPOConfig(folder, gradient_checkpointing=False, disable_tqdm=True, **given)
            function = ByHand(env, ANSWER_TOKENS)
            options: dict[str, Any] = {"processing_class": tokenizer, "rollout_func": function, "callbacks": [clock]}
            GRPOTrainer(model, total_reward, trl_args, prompt_dataset(rows), **options).train()
        else:
            with GRPOEnvTrainer(model, env, args, train_dataset=rows, callbacks=[clock]) as trainer:
                trainer.train()
    print(f"{way}: {clock.seconds[0]:.1f} s", file=sys.stderr)
    return clock.seconds[0]


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30, help="default: 30, as many as SmolLM2-135M has")
    parser.add_argument("--repetitions", type=int, default=3, help="default: 3")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/whole_step.json")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one task group, to see that it runs")
    options = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    size = Size(1, 72, 512, 1) if options.quick else Size(options.layers)
    with contextlib.redirect_stdout(sys.stderr):  # trainers print their metrics
        rounds = [{way: step_seconds(way, size) for way in WAYS} for _ in range(options.repetitions)]
    ratios = {way: [one[way] / one["auto"] for one in rounds] for way in WAYS[1:]}
    print(json.dumps({**size._asdict(), "cpu_s": rounds, "times_auto": ratios}))
    if options.record:
        figures = {f"{way}_by_auto": median(values) for way, values in ratios.items()}
        record(RESULTS, "whole_step", figures, [*range(options.repetitions)], None)


if __name__ == "__main__":
    main()
