"""Predict the return of the rest of a rollout before each of its tokens, with a value head in addition to the policy.

::

    ids ─▶ trunk ─▶ hidden states ─▶ LM head ─▶ the policy
                         └─────────▶ value head ─▶ V before the next token

With ``"shared"``, the trunk is the policy's: the value loss trains it too, through the hidden states of the policy's
forward pass. With ``"separate"``, it is a copy that only the value loss trains. The value model is not part of the
policy, so code that saves, wraps or sends the policy does not affect it. What a trainer does for the policy is
therefore implemented here, too: averaging gradients over the ranks, clipping, saving and loading.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import nn

from agentsgym.agents.policy.model import evaluation_mode
from agentsgym.errors import ConfigError
from agentsgym.training.finite import check_value_gradients
from agentsgym.training.objectives.objective import ForwardPass, Objective, Terms

if TYPE_CHECKING:
    from agentsgym.training._trl import TRLInterface
    from agentsgym.training.observing import ObservedBatch

VALUE_HEAD_FILE: Final = "value_head.safetensors"


class ValueModel(nn.Module):
    """A linear head, in single precision and initialized to 0, on the last hidden states of a trunk.

    Attributes:
        head: Maps a hidden state to the value before the next token.
        trunk: A separate copy of the policy's trunk, adapters included; None if the policy's trunk is shared.
    """

    def __init__(
        self,
        policy: Any,
        kind: str,
        *,
        learning_rate: float,
        loss_weight: float,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Add a head to a policy, or to a copy of its trunk.

        All weights of a copy are trained, even if the policy trains only adapters, so it costs as much as training a
        second model: weights, gradients, optimizer moments, and a separate forward pass.

        Args:
            policy: A causal language model of transformers, with or without PEFT adapters; neither wrapped nor
                sharded.
            kind: ``"shared"`` or ``"separate"``, as the settings have checked.
            learning_rate: Learning rate of the head, and of the copy.
            loss_weight: Factor of :meth:`loss`.
            context: Returns the context in which the trunk is run, such as ``accelerator.autocast``.
        """
        super().__init__()
        base = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
        lm_head = base.get_output_embeddings()
        self.learning_rate = learning_rate
        self.loss_weight = loss_weight
        self.head = nn.Linear(lm_head.in_features, 1, dtype=torch.float32, device=lm_head.weight.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        policy_trunk = base.base_model if base.base_model is not base else base.get_decoder()
        if policy_trunk is base:
            raise ConfigError(
                "a value head requires a causal language model with a separate trunk (base_model or get_decoder()), "
                f"got a {type(base).__name__}"
            )
        if kind == "separate" and getattr(base, "is_quantized", False):
            raise ConfigError(
                "value_head='separate' trains a copy of the policy's weights, but this policy's weights are quantized: "
                "use value_head='shared', or load the policy unquantized"
            )
        self.trunk = copy.deepcopy(policy_trunk).requires_grad_(True).train() if kind == "separate" else None
        self._policy_trunk = (policy_trunk,)  # in a tuple, so that torch does not register it here
        self._context = context
        self._captured: list[torch.Tensor] = []

    @torch.no_grad()
    def values(self, ids: torch.Tensor, attention_mask: torch.Tensor, batch_size: int) -> torch.Tensor:
        """Predict the value before each token, without gradient and without dropout.

        Args:
            ids: (B, L), right-padded.
            attention_mask: (B, L).
            batch_size: Rows per forward pass.

        Returns:
            (B, L) in single precision: the value at t is predicted from the tokens before t; 0.0 on padding and in the
            first column, which no token precedes.
        """
        found = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        with evaluation_mode(self._trunk):
            for start in range(0, len(ids), batch_size):
                rows = slice(start, start + batch_size)
                states = self._states(ids[rows], attention_mask[rows])
                found[rows, 1 : states.shape[1]] = self._predict(states[:, :-1]).to(found)
        return found.masked_fill(attention_mask == 0, 0.0)

    @contextmanager
    def capture_hidden_states(self) -> Generator[None]:
        """Inside the block, store the hidden states of the policy's forward pass, with their graph, for :meth:`loss`.

        If the trunk is separate, nothing is stored.
        """
        self._captured = []
        if self.trunk is not None:
            yield
            return
        handle = self._trunk.register_forward_hook(lambda _module, _args, output: self._captured.append(output[0]))
        try:
            yield
        except BaseException:
            self._captured = []  # they would keep the graph of the forward pass alive
            raise
        finally:
            handle.remove()

    def loss(self, ids: torch.Tensor, attention_mask: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute ``loss_weight · ½ Σ (V - target)²``.

        A separate trunk runs in the mode of this module: with dropout after ``train()``.

        Args:
            ids: (B, L), right-padded; if the trunk is shared, the ids of the captured forward pass, which may have
                omitted columns of padding.
            attention_mask: (B, L).
            targets: (B, L), NaN for no target; the first column is ignored.

        Returns:
            A 0-dim tensor with a graph, even without any target.
        """
        if self.trunk is None and not self._captured:
            raise RuntimeError(
                "a shared value head needs the policy's forward pass: run it inside capture_hidden_states() first"
            )
        states = self._states(ids, attention_mask) if self.trunk is not None else torch.cat(self._captured)
        self._captured = []  # they hold the graph of the whole forward
        targets = targets[:, 1 : states.shape[1]]
        has_target = ~targets.isnan()
        errors = self._predict(states[:, :-1][has_target]) - targets[has_target].to(self.head.weight)
        return self.loss_weight * 0.5 * errors.square().sum()

    def add_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the parameters to an optimizer, with a separate learning rate, unless it already has them."""
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in known for parameter in self.parameters()):
            optimizer.add_param_group(self.parameter_group())

    def broadcast(self) -> None:
        """Copy the parameters of the first rank to all others. Collective."""
        if _num_ranks() > 1:
            for tensor in chain(self.parameters(), self.buffers()):
                dist.broadcast(tensor.data, src=0)

    def parameter_group(self) -> dict[str, Any]:
        """The optimizer's parameter group for the head, and for the trunk if it is separate; without weight decay."""
        return {"params": list(self.parameters()), "lr": self.learning_rate, "weight_decay": 0.0}

    def reduce_gradients(self) -> None:
        """Average the gradients over the ranks, once before each optimizer step. Collective."""
        num_ranks = _num_ranks()
        if num_ranks == 1:
            return
        for parameter in self.parameters():
            if parameter.grad is None:  # here; another rank may have one
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)  # pyright: ignore[reportUnknownMemberType]
            parameter.grad /= num_ranks

    def save(self, folder: str | Path) -> None:
        """Write ``value_head.safetensors``: the head, and the trunk if it is separate."""
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in self.state_dict().items()}
        save_file(tensors, Path(folder) / VALUE_HEAD_FILE, metadata={"format": "pt"})

    def load(self, folder: str | Path) -> None:
        """Read what :meth:`save` wrote."""
        path = Path(folder) / VALUE_HEAD_FILE
        if not path.is_file():
            raise ConfigError(f"{path} is missing: cannot resume a value head from {folder}, which holds none")
        found, own = load_file(path), self.state_dict()
        for name in sorted(found.keys() | own.keys()):
            expected, given = (
                f"of shape {tuple(tensors[name].shape)}" if name in tensors else "absent" for tensors in (own, found)
            )
            if expected != given:
                raise ConfigError(
                    f"{path} belongs to a different value head or model: {name} must be {expected}, got {given}"
                )
        self.load_state_dict(found)

    @property
    def _trunk(self) -> nn.Module:
        """The trunk that is run: the copy, or the policy's."""
        return self._policy_trunk[0] if self.trunk is None else self.trunk

    def _states(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The last hidden states, up to the end of the longest row, (B, at most L, H)."""
        width = max(1, int(attention_mask.sum(1).max()))  # rows of rollouts that failed to start are empty
        with self._context():
            return self._trunk(input_ids=ids[:, :width], attention_mask=attention_mask[:, :width], use_cache=False)[0]

    def _predict(self, states: torch.Tensor) -> torch.Tensor:
        """The values after the tokens of these hidden states, (…, H) to (…)."""
        with torch.autocast(states.device.type, enabled=False):  # it would run the head in half precision
            return self.head(states.to(self.head.weight)).squeeze(-1)


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class ValueLoss(Objective):
    """The value head's squared errors, as a mean over the targets.

    It averages, clips and clears the head's gradients, as ``Trainer`` does for its model alone.
    """

    metric = "value_loss"
    count_column = "num_value_targets"

    def __init__(self, value_model: ValueModel, trl: TRLInterface) -> None:
        self._value_model = value_model
        self._trl = trl

    def columns(self, batch: ObservedBatch) -> dict[str, torch.Tensor]:
        """Return ``value_targets``, (B, L), NaN where there is none, and the number of targets."""
        targets = batch.tokens.tensor(batch.advantages.value_targets or ()).masked_fill(batch.mask == 0, math.nan)
        num_targets = self._trl.sum_over_ranks(targets.isfinite().sum())
        return {"value_targets": targets, "num_value_targets": num_targets}

    def capturing(self) -> AbstractContextManager[None]:
        """Store the hidden states of the policy's forward pass."""
        return self._value_model.capture_hidden_states()

    def terms(self, forward: ForwardPass) -> Terms:
        """Return the weighted squared errors, which are logged with their weight."""
        self._value_model.train(forward.is_training)
        ids, attention_mask, targets = (
            forward.batch[name][:, : forward.stop]
            for name in ("prompt_completion_ids", "attention_mask", "value_targets")
        )
        loss = self._value_model.loss(ids, attention_mask, targets)
        return Terms(weighted=loss, total=loss, count=targets.isfinite().sum())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Collective: start with equal weights on all ranks, and without gradients of an interrupted run."""
        self._value_model.broadcast()
        self._value_model.zero_grad()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Collective: average the gradients over the ranks, and clip them to the norm that the policy's may have."""
        self._value_model.reduce_gradients()
        check_value_gradients(self._value_model, state.global_step + 1)
        if args.max_grad_norm:
            nn.utils.clip_grad_norm_(self._value_model.parameters(), args.max_grad_norm)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clear the gradients that were just used."""
        self._value_model.zero_grad()
