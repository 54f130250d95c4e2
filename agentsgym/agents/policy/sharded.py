"""Sample from a model whose weights are sharded over all ranks (FSDP2, ZeRO-3): every forward pass needs all ranks.

Ranks play episodes of different lengths, so they need different numbers of forward passes. A rank that runs one
announces it, and an idle rank joins with one token, whose output is discarded::

    rank 0    1 forward   1 forward   1 forward   0
    rank 1    1 forward   0 joins     0 joins     0      no rank has more to run: all continue
              act         finish ─────────────────▶
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, reduce
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.agents.policy.decoding import Forward
from agentsgym.agents.policy.decoding_strategy import select_strategy
from agentsgym.agents.trained import BatchStart
from agentsgym.errors import ConfigError
from agentsgym.interruptions import Interruption, is_interruption


class ShardedForwardError(Interruption):
    """A forward pass failed on this rank, while the others wait for its part of the weights.

    Handling it here would leave them waiting. Like ``KeyboardInterrupt``, it is therefore not an ``Exception``: it ends
    the process, and the launcher then ends the others.
    """


class LockstepForward:
    """Calls a model so that all ranks take part in each of its forward passes."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        self._is_broken = False

    def __call__(self, **arguments: Any) -> Any:
        """Run the model; every other rank must be here or in :meth:`join`. Collective."""
        if self._is_broken:
            raise ShardedForwardError("a forward pass of the sharded model already failed on this rank")
        with self.abort_all_ranks_on_error():
            self._num_running(1)
            return self._model(**arguments)

    def join(self, idle: Callable[[], Any]) -> None:
        """Take part in the forward passes of other ranks, by calling ``idle``, until all ranks are here. Collective.

        Raises:
            ShardedForwardError: The model raised.
        """
        if self._is_broken:
            return  # the others are in a forward pass, which would take a flag for a shard of the weights
        with self.abort_all_ranks_on_error():
            while self._num_running(0) > 0:
                idle()

    @contextlib.contextmanager
    def abort_all_ranks_on_error(self) -> Generator[None]:
        """End the run if the model raises an error inside the block, which all ranks must run.

        Raises:
            ShardedForwardError: In place of any exception except ``ConfigError``, which is raised on all ranks.
        """
        try:
            yield
        except ConfigError:
            raise
        except BaseException as error:
            self._is_broken = True
            if is_interruption(error):
                raise
            rank = PartialState().process_index
            raise ShardedForwardError(
                f"a forward pass of the sharded model failed on rank {rank}: {error!r}"
            ) from error

    def _num_running(self, flag: int) -> torch.Tensor:
        """Return the sum of the flags of all ranks, 0-dim; synchronizes only when it is read. Collective."""
        total: Any = reduce(torch.tensor(flag, device=PartialState().device), reduction="sum")
        return total


class ShardedPolicyAgent(PolicyAgent):
    """A :class:`PolicyAgent` for a model whose every forward pass needs all ranks.

    Each rank calls :meth:`prepare` before a rollout, and :meth:`finish`, which waits for the others, once no episode is
    live; in between, it acts as often as needed, or never. An error between two forward passes affects only its
    rank; an error inside one ends the run.
    """

    _moves_weights = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        forward: Callable[..., Any] | None = None,
        **settings: Any,
    ) -> None:
        """Set up sampling; nothing is run.

        Args:
            model: A causal language model.
            tokenizer: The model's tokenizer.
            forward: The wrapper to call instead of the model if sharding wraps it; by default the model.
            **settings: See :class:`PolicyAgent`.
        """
        super().__init__(model, tokenizer, **settings)
        self._collective = forward or model
        self._forward = self._lockstep = LockstepForward(self._collective)

    def prepare(self, start: BatchStart) -> None:
        """Choose how to sample from the model. Collective.

        Raises:
            ConfigError: The model cannot be sampled; raised on all ranks.
        """
        super().prepare(start)
        with self._inference(), self._lockstep.abort_all_ranks_on_error():
            select_strategy(self.model, self._collective)

    def finish(self) -> None:
        """Drop the caches, and take part in forward passes until all ranks have finished. Collective."""
        super().finish()
        idle = Forward(self.model, self._collective)
        with self._inference():
            self._lockstep.join(lambda: idle([[0]], use_cache=False))


def zero_stage(accelerator: Any) -> int:
    """Return the stage of DeepSpeed ZeRO; 0 without DeepSpeed."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return 0
    return accelerator.state.deepspeed_plugin.zero_stage


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether each rank stores only a part of the weights between forward passes."""
    return accelerator.distributed_type == DistributedType.FSDP or zero_stage(accelerator) == 3


def policy_agent_type(accelerator: Accelerator, *, gathers: bool = False) -> type[PolicyAgent]:
    """Choose the agent class by how the weights of the model in training are distributed over the ranks.

    ``gathers`` means that ZeRO-3's weights are gathered on every rank while episodes are played.
    """
    if not is_sharded(accelerator):
        return PolicyAgent
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ConfigError(
            "training with FSDP1 is not supported because it has not been tested: use FSDP2 (fsdp_config={'version': "
            "2}, or `fsdp_version: 2` in the accelerate config file) or DeepSpeed ZeRO-3"
        )
    return PolicyAgent if zero_stage(accelerator) == 3 and gathers else ShardedPolicyAgent
