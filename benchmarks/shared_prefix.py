"""What it saves to compute the tokens that rows of a micro-batch share once: CPU time, and memory kept for backward.

A Llama of SmolLM2-135M's shape with random weights scores rows of random tokens, by TRL's head and as the trainer does,
and the gradient of a weighted sum is computed. Both ways alternate in one process, on one thread, in float32.

- ``prompt N``: one micro-batch, a group of 8 rollouts of 4 turns with a prompt of N tokens, 100 to 400 agent tokens.
- ``nothing shared``: 8 rows of 400 tokens. What looking for shared tokens costs.
- ``rewritten``: the rows of one rollout of 16 turns whose history is rendered again, earlier thoughts left out, in
  parts of 8 rows. Tokens are also counted of 8 such rollouts, in parts of 8.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch, transformers and vLLM leave parts of their signatures untyped.

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

from agentsgym.agents.policy.attention import EXTENDED, SDPA
from agentsgym.batch.views import pad_right
from agentsgym.training.tensors.scoring import POSITIONS_AT_ONCE, mask_labels, score_labeled_only
from agentsgym.training.tensors.shared_prefix import micro_batches, num_computed

RESULTS = Path(__file__).parent / "results"
SIZE = 8  # rows of a micro-batch
Row = tuple[list[int], list[int]]  # token ids, and 1 for the agent's
Batch = dict[str, torch.Tensor]


def some(draw: random.Random, count: int) -> list[int]:
    """Random tokens."""
    return [draw.randrange(100, 49_000) for _ in range(count)]


def group(draw: random.Random, prompt_length: int) -> list[Row]:
    """Rollouts of a task group."""
    prompt, rows = some(draw, prompt_length), list[Row]()
    for _ in range(SIZE):
        ids, mask, agent_tokens = [*prompt], [0] * prompt_length, draw.randint(100, 400) // 4
        for observed in (draw.randint(15, 60), draw.randint(15, 60), draw.randint(15, 60), 0):
            ids += some(draw, agent_tokens + observed)
            mask += [1] * agent_tokens + [0] * observed
        rows.append((ids, mask))
    return rows


def rewritten(draw: random.Random, num_rollouts: int, num_turns: int) -> list[Row]:
    """Rows of rollouts of one task, one a turn: of each earlier action, the last third is shown."""
    prompt, rows = some(draw, 500), list[Row]()
    for _ in range(num_rollouts):
        shown = [*prompt]
        for _ in range(num_turns):
            action = some(draw, draw.randint(20, 60))
            rows.append((shown + action, [0] * len(shown) + [1] * len(action)))
            shown = shown + action[-(len(action) // 3) :] + some(draw, draw.randint(60, 150))
    return rows


def stacked(rows: Sequence[Row]) -> Batch:
    """A generation batch, right-padded."""
    width = max(len(ids) for ids, _ in rows)
    columns = [ids for ids, _ in rows], [[1] * len(ids) for ids, _ in rows], [mask for _, mask in rows]
    names = "prompt_completion_ids", "attention_mask", "agent_token_mask"
    return {
        name: torch.tensor([pad_right(row, width, 0) for row in column])
        for name, column in zip(names, columns, strict=True)
    }


def parts_of(batch: Batch, *, shares: bool) -> Iterator[tuple[torch.Tensor, Batch]]:
    """The micro-batches, each cut to its own length, and the places of their rows."""
    for places in micro_batches(batch, SIZE, shares=shares):
        part = {name: tensor[places] for name, tensor in batch.items()}
        stop = int(part["attention_mask"].sum(1).max())
        yield places, {name: tensor[:, :stop] for name, tensor in part.items()}


def tokens_of(batch: Batch, *, shares: bool) -> int:
    """The number of tokens that the model computes, padding included."""
    count = 0
    for _, part in parts_of(batch, shares=shares):
        lengths = part["attention_mask"].sum(1).tolist()
        rows = [row[:length] for row, length in zip(part["prompt_completion_ids"].tolist(), lengths, strict=True)]
        count += num_computed(rows) if shares else part["attention_mask"].numel()
    return count


def make_model(layers: int, width: int) -> Any:
    """A model of random weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": width * 8 // 3, "num_hidden_layers": layers}
    heads: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    config = LlamaConfig(vocab_size=49_152, max_position_embeddings=8192, **sizes, **heads)
    return with_head(LlamaForCausalLM(config))


def with_head(model: Any) -> Any:
    """Give a model TRL's head, around which is ours."""
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    score_labeled_only(model)
    model.packs_rows = True  # where its attention is the extended one
    chunked_logprob.TOKEN_CHUNK_SIZE = POSITIONS_AT_ONCE
    return model.train()


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes of tensors that a forward pass keeps, without weights and each storage once."""

    def __init__(self, model: Any) -> None:
        weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
        self.found: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                self.found[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(keep, lambda tensor: tensor)


class Step(NamedTuple):
    """Loss and backward over all micro-batches."""

    seconds: float  # CPU time; on a GPU, time
    most: int  # bytes that a micro-batch keeps for backward
    logprobs: torch.Tensor  # (B, L), 0 but for the agent's tokens
    gradient: torch.Tensor  # (number of weights,)


def now(device: str) -> float:
    """CPU time; on a GPU, time, after what was begun there."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def step(model: Any, batch: Batch, *, shares: bool) -> Step:
    """Compute loss and gradients."""
    model.set_attn_implementation(EXTENDED[SDPA] if shares else SDPA)
    model.zero_grad()
    scores = torch.zeros(batch["agent_token_mask"].shape, device=model.device)
    most, start = 0, now(model.device.type)
    for places, part in parts_of(batch, shares=shares):
        ids, mask, saved = part["prompt_completion_ids"], part["agent_token_mask"], Saved(model)
        with saved:
            labels = ids.masked_fill(part["attention_mask"] == 0, -100)
            inputs = {"input_ids": ids, "attention_mask": part["attention_mask"], "labels": labels}
            logprobs = mask_labels(model, mask)(**inputs, fused_lm_head=True).log_probs
        (logprobs * torch.linspace(-1, 1, logprobs.shape[1], device=model.device)).sum().div(mask.sum()).backward()
        most = max(most, sum(saved.found.values()))
        scores[places, 1 : mask.shape[1]] = logprobs.detach().float() * mask[:, 1:]
    seconds = now(model.device.type) - start
    return Step(seconds, most, scores, torch.cat([one.grad.flatten() for one in model.parameters()]))


def measure(model: Any, batch: Batch, repetitions: int) -> dict[str, Any]:
    """Alternate both ways."""
    ratios: list[float] = []
    steps: dict[bool, Step] = {}
    for repetition in range(repetitions):
        for shares in (False, True) if repetition % 2 == 0 else (True, False):
            steps[shares] = step(model, batch, shares=shares)
        ratios.append(steps[False].seconds / steps[True].seconds)
    apart, together = (tokens_of(batch, shares=shares) for shares in (False, True))
    return {
        "tokens": [apart, together],
        "ratios": [round(one, 3) for one in ratios],
        "kept": round(steps[True].most / steps[False].most, 3),
        "gradient_gap": float((steps[True].gradient - steps[False].gradient).norm() / steps[False].gradient.norm()),
    }


def figures_of(result: dict[str, Any]) -> dict[str, Any]:
    """Each is what is computed without sharing relative to what is with it, or what is saved with it to without."""
    from benchmarks.record import median  # noqa: PLC0415  # a script finds it only in the repository's root

    figures: dict[str, Any] = {"layers": median([result["layers"]])}
    for name, found in result.items():
        if isinstance(found, dict):
            apart, together = found["tokens"]
            figures[f"{name}: tokens"] = median([apart / together])
            figures |= {f"{name}: time": median(found["ratios"])} if "ratios" in found else {}
            figures |= {f"{name}: kept for backward": median([found["kept"]])} if "kept" in found else {}
    return figures


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--record", type=Path, nargs="?", const=RESULTS, help="write the ratios into this folder")
    parser.add_argument("--layers", type=int, default=30, help="layers of the model; 30 need 35 GB (default: 30)")
    parser.add_argument("--repetitions", type=int, default=3, help="(default: 3)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and short rows, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw, quick = random.Random(0), options.quick
    model = make_model(1, 36) if quick else make_model(options.layers, 576)
    cases = {f"prompt {length}": group(draw, length) for length in ([100] if quick else [100, 500, 1500])}
    cases["nothing shared"] = [(some(draw, 400), [0] * 200 + [1] * 200) for _ in range(SIZE)]
    cases["rewritten"] = rewritten(draw, 1, 9 if quick else 16)
    step(model, stacked(cases["nothing shared"]), shares=True)  # warms up
    result: dict[str, Any] = {"layers": model.config.num_hidden_layers}
    for name, rows in cases.items():
        result[name] = measure(model, stacked(rows), 1 if quick else options.repetitions)
        if not options.json:
            print(name, result[name], flush=True)
    many = stacked(rewritten(draw, 2 if quick else 8, 16))
    result["rewritten, 8 rollouts"] = {"tokens": [tokens_of(many, shares=shares) for shares in (False, True)]}
    print(json.dumps(result) if options.json else result["rewritten, 8 rollouts"])
    if options.record:
        from benchmarks.record import record  # noqa: PLC0415  # a script finds it only in the repository's root

        record(options.record, "shared_prefix", figures_of(result), seeds=[0], behavior=None)


if __name__ == "__main__":
    main()
