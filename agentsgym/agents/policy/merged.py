"""Sample with the adapters of a model merged into its weights, which runs fewer operators per token."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.errors import ConfigError
from agentsgym.texts import sentence_of


def adapted_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that the active adapters of a model change; none for a model without PEFT's adapters.

    Raises:
        ConfigError: The adapters cannot be merged: a weight is quantized, or used by a module without the adapter, too.
    """
    found = dict.fromkeys(weight for layer in _layers(model) for weight in layer.get_base_layer().parameters())
    uses = [(name, weight) for name, weight in model.named_parameters(remove_duplicate=False) if weight in found]
    counts = Counter(weight for _, weight in uses)
    if tied := [name for name, weight in uses if counts[weight] > 1]:
        raise ConfigError(f"adapters of tied weights cannot be merged: {' and '.join(tied)} are the same weight")
    if any(not weight.is_floating_point() for weight in found):
        raise ConfigError("adapters cannot be merged into quantized weights")
    return [*found]


def _layers(model: nn.Module) -> list[Any]:
    """Return the modules with adapters inside layers, in the order of the model."""
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415  # an extra

    return [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]


class MergedPolicyAgent(PolicyAgent):
    """A :class:`PolicyAgent` that samples from weights with the active adapters merged in.

    Merging adds the adapters to copies of the adapted weights, at the first turn after the weights have changed; the
    weights in training stay bit for bit what they are. The copies are dropped by :meth:`finish`. Since a merged weight
    is rounded to its dtype, the log-probabilities are not exactly those of the model in training.
    """

    logprobs_match_trained_weights = False

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """Set up sampling; nothing is run. The arguments are those of :class:`PolicyAgent`."""
        super().__init__(*arguments, **settings)
        self._layers = _layers(self.model)
        self._adapted = adapted_weights(self.model)
        self._merged: list[torch.Tensor] = []  # what replaces the adapted weights, in their order
        self._merged_from: list[tuple[int, int]] = []  # the versions of the model's own weights

    def finish(self) -> None:
        """Drop the caches of the sessions, which have ended, and the merged weights."""
        super().finish()
        self._merged = []

    def _versions(self) -> list[tuple[int, int]]:
        """Return those of the model's own weights: the merged ones are made anew when these change."""
        return self._merged_from

    @contextlib.contextmanager
    def _inference(self) -> Generator[None]:
        with super()._inference():
            is_off = any(layer.disable_adapters for layer in self._layers)
            versions = [*super()._versions(), (hash((*self._layers[0].active_adapters, is_off)), 0)]
            if is_off:  # PEFT would unmerge the copies in place
                self._merged, self._merged_from = [], versions
                yield
                return
            if not self._merged or versions != self._merged_from:
                self._merged, self._merged_from = self._merge(), versions
            with self._restored():
                for weight, data in zip(self._adapted, self._merged, strict=True):
                    weight.data = data
                for layer in self._layers:
                    layer.merged_adapters[:] = layer.active_adapters
                yield

    def _merge(self) -> list[torch.Tensor]:
        """Return the merged weights, in the order of the adapted ones."""
        with self._restored():
            try:
                for layer in self._layers:
                    layer.merge(safe_merge=True)  # replaces the data of a weight, and leaves the tensor as it is
                if [*map(id, adapted_weights(self.model))] != [*map(id, self._adapted)]:
                    for layer in self._layers:
                        layer.unmerge()
                    raise NotImplementedError("it would exchange modules")  # noqa: TRY301
            except (NotImplementedError, RuntimeError, ValueError) as error:
                text = f"the adapters cannot be merged for sampling: {sentence_of(error)}"
                raise ConfigError(f"{text}; set merge_adapters_for_sampling=False") from error
            return [weight.data for weight in self._adapted]

    @contextlib.contextmanager
    def _restored(self) -> Generator[None]:
        """Give the model its own weights back after the block, with the adapters beside them."""
        own = [weight.data for weight in self._adapted]
        try:
            yield
        finally:
            for weight, data in zip(self._adapted, own, strict=True):
                weight.data = data
            for layer in self._layers:
                layer.merged_adapters.clear()
