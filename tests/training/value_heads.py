"""Value heads on small policies, for the tests of them; run as a script it is one of their two ranks."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.distributed as dist

from agentsgym.tiny import tiny_policy
from agentsgym.training.objectives.value_head import ValueModel

LENGTHS = (9, 4, 7)  # of the rows; the batch is wider than the longest
MASK = torch.tensor([[1] * length + [0] * (11 - length) for length in LENGTHS])
WORDS = ["a b c d e f g h"]


def policy(**sizes: Any) -> Any:
    """A Llama of width 16, in evaluation mode."""
    return tiny_policy(WORDS, **{"hidden_size": 16, "num_heads": 2, **sizes})[0].eval()


def value_model(model: Any, kind: str = "shared", **changes: Any) -> ValueModel:
    """As it is made: all values are 0."""
    settings: dict[str, Any] = {"learning_rate": 1e-3, "loss_weight": 1.0, **changes}
    return ValueModel(model, kind, **settings)


def with_some_head(model: Any, kind: str = "shared", **changes: Any) -> ValueModel:
    """With a head that states something."""
    own = value_model(model, kind, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in own.head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return own


def some_ids(model: Any) -> torch.Tensor:
    """Rows of words, right-padded."""
    ids = torch.randint(4, model.config.vocab_size, MASK.shape, generator=torch.Generator().manual_seed(0))
    return ids.masked_fill(MASK == 0, 0)


def some_targets() -> torch.Tensor:
    """On every second token; none on padding or in the first column."""
    targets = torch.randn(MASK.shape, generator=torch.Generator().manual_seed(2))
    learnt = (MASK == 1) & (torch.arange(MASK.shape[1]) % 2 == 1)
    return targets.masked_fill(~learnt, math.nan)


def reference_values(own: ValueModel, model: Any) -> torch.Tensor:
    """From a plain forward of the whole model: the hidden state at t - 1 reports the value at t."""
    with torch.no_grad():
        states = model(some_ids(model), attention_mask=MASK, output_hidden_states=True).hidden_states[-1].float()
        values = states @ own.head.weight[0].to(states) + own.head.bias.to(states)
    shifted = torch.cat([torch.zeros(len(values), 1), values[:, :-1]], 1)
    return shifted * MASK


def loss_of(own: ValueModel, model: Any, targets: torch.Tensor, num_targets: Any = None) -> torch.Tensor:
    """As a trainer has it: the policy's forward, without columns that are padding in all rows, then the loss."""
    ids, last = some_ids(model), max(LENGTHS)
    count = targets.isfinite().sum() if num_targets is None else num_targets
    with own.capture_hidden_states():
        model(input_ids=ids[:, :last], attention_mask=MASK[:, :last])
    return own.loss(ids, MASK, targets) / count


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Those that are not 0, by name."""
    return {name: part.grad for name, part in module.named_parameters() if part.grad is not None and part.grad.any()}


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    trained = with_some_head(policy(), "separate")
    if rank == 0:  # the other has nothing to learn from
        (2 * loss_of(trained, policy(), some_targets())).backward()  # as the trainer does, since ranks are averaged
    trained.reduce_gradients()
    torch.save([parameter.grad for parameter in trained.parameters()], f"{folder}/{rank}.pt")
    dist.destroy_process_group()
