"""Sampling from a model whose weights lie in pieces on all ranks (FSDP): every forward pass needs all ranks.

Ranks play episodes of different lengths, so they need different numbers of forward passes. Whoever runs one says so
first, and whoever has nothing to run joins in with one token that nobody reads::

    rank 0    1 forward   1 forward   1 forward   0
    rank 1    1 forward   0 joins     0 joins     0      nobody has more to run: all go on
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

from agentsgym.agents.decoding import Forward
from agentsgym.agents.policy import PolicyAgent
from agentsgym.agents.probing import fastest_way
from agentsgym.errors import ConfigError


class OutOfStep(BaseException):
    """A forward pass broke off on this rank, while the others wait for its part of the weights.

    Handling it here would leave them waiting. So it is no ``Exception``, as little as ``KeyboardInterrupt`` is one: it
    ends the process, and with it the launcher ends the others.
    """


class InStep:
    """Calls a model so that each of its forward passes is one of all ranks."""

    def __init__(self, model: Callable[..., Any]) -> None:
        """Set up; nothing is sent.

        Args:
            model: A causal language model, or what wraps it.
        """
        self._model = model
        self._is_broken = False

    def __call__(self, **arguments: Any) -> Any:
        """Run the model, while every other rank is here or in :meth:`join`.

        Raises:
            OutOfStep: The model raised, now or in an earlier call.
        """
        if self._is_broken:
            raise OutOfStep("a forward pass of the sharded model broke off on this rank before")
        with self.ending_all_if_broken():
            self._num_running(1)
            return self._model(**arguments)

    def join(self, idle: Callable[[], Any]) -> None:
        """Run along with the other ranks until all of them have come here.

        Args:
            idle: Runs the model itself once, on anything.

        Raises:
            OutOfStep: The model raised.
        """
        if self._is_broken:
            return  # the others are inside a forward pass, and would take a flag for a part of the weights
        with self.ending_all_if_broken():
            while self._num_running(0) > 0:
                idle()

    @contextlib.contextmanager
    def ending_all_if_broken(self) -> Generator[None]:
        """Run the model inside without a word to the other ranks, which do the same.

        Raises:
            OutOfStep: In place of an exception other than a ``ConfigError``, which is raised on all ranks alike.
        """
        try:
            yield
        except ConfigError:
            raise
        except BaseException as error:
            self._is_broken = True
            if not isinstance(error, Exception):
                raise
            rank = PartialState().process_index
            raise OutOfStep(f"a forward pass of the sharded model broke off on rank {rank}: {error!r}") from error

    def _num_running(self, flag: int) -> torch.Tensor:
        """The sum over all ranks, 0-dim; nobody waits for it but who reads it."""
        total: Any = reduce(torch.tensor(flag, device=PartialState().device), reduction="sum")
        return total


class ShardedPolicyAgent(PolicyAgent):
    """Samples as a :class:`PolicyAgent` does, from a model whose every forward pass needs all ranks.

    Each rank calls :meth:`begin` before it plays and :meth:`finish` when it has no live episode left, which waits for
    the others; in between it acts as often as it has to, or never. What is raised between two forward passes is its
    own matter; what a forward pass raises ends the run.
    """

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
            tokenizer: Its tokenizer.
            forward: What is called in the model's stead, where sharding wraps it; by default the model itself.
            **settings: As of :class:`PolicyAgent`.
        """
        super().__init__(model, tokenizer, **settings)
        self._collective = forward or model
        self._forward = self._in_step = InStep(self._collective)

    def begin(self) -> None:
        """Find out how the model is sampled, on all ranks at once: what it refuses to do, it refuses on all of them.

        Raises:
            ConfigError: It cannot be sampled.
        """
        with self._inference(), self._in_step.ending_all_if_broken():
            fastest_way(self.model, self._collective)

    def finish(self) -> None:
        """Drop the caches, and run along with the other ranks until all of them have finished."""
        super().finish()
        idle = Forward(self.model, self._collective)
        with self._inference():
            self._in_step.join(lambda: idle([[0]], use_cache=False))


def policy_agent_type(accelerator: Accelerator) -> type[PolicyAgent]:
    """Choose the agent that suits how the ranks hold the weights of the model in training.

    Raises:
        ConfigError: They hold them in pieces, and in another way than FSDP2.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ConfigError("training with DeepSpeed is refused, since it has not been proven: shard with fsdp=True")
    if accelerator.distributed_type != DistributedType.FSDP:
        return PolicyAgent
    if not accelerator.is_fsdp2:
        raise ConfigError(
            "training with FSDP1 is refused, since it has not been proven: set fsdp_config={'version': 2}"
        )
    return ShardedPolicyAgent
