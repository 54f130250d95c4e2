"""What a training step of SmolLM2 costs beside the model alone.

Steps of number guessing (LoRA on all linear layers, bfloat16 weights, 32 rollouts of up to five turns), in CPU time,
against a plain loop over a model with the same adapters and the same rollouts: every different first prompt and every
observation run once, one forward pass per sampled token, and one forward and backward pass over every row. Then
the sampling of one long turn against ``generate``.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import DynamicCache

from agentsgym import GRPOEnvConfig, GRPOEnvTrainer, PolicyAgent, RolloutStore, Trajectory
from agentsgym.agents.policy.loading import load_model
from agentsgym.types import Action, TurnRequest
from benchmarks.gpu_steps import StepClock
from benchmarks.real_games import NumberGuessing

NUM_ROLLOUTS, LONG_TURN = 32, 48
MAX_TURNS, MAX_TURN_TOKENS = 5, 12


def build_trainer(folder: Path, num_steps: int, micro_batch: int) -> GRPOEnvTrainer:
    """Create the trainer of the measured steps, whose rate is so low that the game stays as it is."""
    model, tokenizer = load_model("smollm2", dtype=torch.bfloat16)
    env = NumberGuessing(tokenizer, {"max_steps_per_episode": MAX_TURNS, "error_allowance": MAX_TURNS})
    args = GRPOEnvConfig(
        str(folder),
        max_steps=num_steps,
        learning_rate=1e-7,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=NUM_ROLLOUTS // micro_batch,
        num_generations=8,
        max_turn_tokens=MAX_TURN_TOKENS,
        store_rollouts=True,
        use_cpu=True,
        bf16=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = Dataset.from_list([{"task_data": {"seed": seed}} for seed in range(1000)])
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    return GRPOEnvTrainer(model, env, args, train_dataset=rows, peft_config=lora)


def run_bare_sampling(model: Any, rollouts: Sequence[Trajectory]) -> None:
    """Run what the rollouts' sampling needs: prompts and observations once, then token by token, in one batch."""
    live, cache = list(rollouts), DynamicCache()
    firsts = [tuple(one.token_ids[: one.turns[0].start]) for one in rollouts]
    different = list(dict.fromkeys(firsts))
    with torch.no_grad():
        prompts = _ids(len(different), max(map(len, different)))
        model(input_ids=prompts, past_key_values=cache, logits_to_keep=1)
        cache.batch_select_indices(torch.tensor([different.index(prompt) for prompt in firsts]))
        for turn in range(MAX_TURNS):
            rows = [row for row, one in enumerate(live) if len(one.turns) > turn]
            if not rows:
                return
            live = [live[row] for row in rows]
            cache.batch_select_indices(torch.tensor(rows))
            if turn:
                widths = [one.turns[turn].start - one.turns[turn - 1].stop for one in live]
                model(input_ids=_ids(len(live), max(widths)), past_key_values=cache, logits_to_keep=1)
            for _ in range(max(one.turns[turn].stop - one.turns[turn].start for one in live) - 1):
                model(input_ids=_ids(len(live), 1), past_key_values=cache, logits_to_keep=1)


def run_bare_training(model: Any, rollouts: Sequence[Trajectory], micro_batch: int) -> None:
    """Run one forward and backward pass over every row, the head on the agent's tokens alone."""
    rows = sorted(rollouts, key=lambda one: len(one.token_ids))
    base = model.get_base_model()
    for start in range(0, len(rows), micro_batch):
        batch = rows[start : start + micro_batch]
        ids = torch.zeros(len(batch), max(len(one.token_ids) for one in batch), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(batch):
            ids[row, : len(one.token_ids)] = torch.tensor(one.token_ids)
            mask[row, : len(one.token_ids)] = torch.tensor(one.agent_token_mask)
        states = base.model(input_ids=ids).last_hidden_state[:, :-1][mask[:, 1:] == 1]
        logits = base.lm_head(states).float()
        torch.nn.functional.cross_entropy(logits, ids[:, 1:][mask[:, 1:] == 1]).backward()


def sampling_ratio(model: Any, tokenizer: Any, repeats: int) -> float:
    """Return the rate of ``PolicyAgent`` divided by that of ``generate``, for one long turn of different prompts."""
    lengths = {"min_new_tokens": LONG_TURN, "max_new_tokens": LONG_TURN}
    prompts = _ids(NUM_ROLLOUTS, 60)
    mask = torch.ones_like(prompts)
    bare = _cpu(lambda: model.generate(prompts, attention_mask=mask, do_sample=True, top_k=0, **lengths), repeats)

    def ours() -> None:
        agent = PolicyAgent(model, tokenizer)
        agent.stop_token_ids = frozenset()
        requests = [
            TurnRequest(session_id=str(row), messages=[], token_ids=ids, max_new_tokens=LONG_TURN)
            for row, ids in enumerate(prompts.tolist())
        ]
        for action in agent.act(requests):
            assert isinstance(action, Action)
            assert len(action.token_ids or ()) == LONG_TURN

    return bare / _cpu(ours, repeats)


def measure(num_steps: int, micro_batch: int) -> dict[str, float]:
    """Train for some steps, replay what they needed, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, times = build_trainer(Path(folder), num_steps, micro_batch), StepClock("cpu")
        trainer.add_callback(times)
        trainer.train()
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        stored = list(RolloutStore(Path(folder) / "rollouts"))
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    generate_ratio = sampling_ratio(copy.deepcopy(model).eval(), trainer.processing_class, 2)
    # torch copies a frozen head for every row of states that are not contiguous: bare passes avoid that too.
    model.get_output_embeddings().register_forward_pre_hook(lambda _, states: (states[0].contiguous(),))
    batches = [stored[start : start + NUM_ROLLOUTS] for start in range(0, len(stored), NUM_ROLLOUTS)]
    sampling, training = [], []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in batches:
            sampling.append(_cpu(lambda batch=batch: run_bare_sampling(model, batch), 1))
            training.append(_cpu(lambda batch=batch: run_bare_training(model, batch, micro_batch), 1))
    bare = [sum(pair) for pair in zip(sampling, training, strict=True)]
    ratios = [ours / alone for ours, alone in zip(times.seconds[1:], bare[1:], strict=True)]  # the first one warms up
    return {
        "tokens_per_rollout": sum(len(one.token_ids) for one in stored) / len(stored),
        "turns_per_rollout": sum(len(one.turns) for one in stored) / len(stored),
        "step_cpu_s": median(times.seconds[1:]),
        "bare_sampling_cpu_s": median(sampling[1:]),
        "bare_training_cpu_s": median(training[1:]),
        "step_by_bare": median(ratios),
        "sampling_rate_by_generate": generate_ratio,
        "the_same_with_contiguous_states": sampling_ratio(model.eval(), trainer.processing_class, 2),
        "peak_mb": peak_mb,
    }


def _ids(num_rows: int, num_columns: int) -> torch.Tensor:
    return torch.randint(0, 49_000, (num_rows, num_columns))


def _cpu(call: Callable[[], Any], repeats: int) -> float:
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="training steps; the first is not counted")
    parser.add_argument("--micro-batch", type=int, default=8, help="rows per forward and backward pass")
    options = parser.parse_args()
    found = measure(options.steps, options.micro_batch)
    print(json.dumps({name: round(value, 3) for name, value in found.items()}, indent=1))


if __name__ == "__main__":
    main()
