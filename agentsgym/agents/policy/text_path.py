"""Find the parts of a model that text reaches: models of images or sounds have towers beside them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch import nn
from transformers.pytorch_utils import Conv1D

from agentsgym.texts import shown

logger = logging.getLogger(__name__)
_warned: WeakSet[nn.Module] = WeakSet()


def without_adapters(model: Any) -> Any:
    """Return the model inside PEFT's, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: Any) -> tuple[Any, str]:
    """Return the part of a model, without adapters, that maps a text's embeddings to hidden states, and its name."""
    found = model.get_decoder()
    decoder = getattr(found, "model", found)  # Llama 4's is a whole causal language model
    return decoder, next(name for name, module in model.named_modules() if module is decoder)


def expose_decoder(model: Any) -> None:
    """Let TRL find the decoder of Llama 4, whose classes name an attribute that they do not have."""
    whole = without_adapters(model)
    if whole.base_model is whole:
        whole.base_model_prefix, vars(whole)["text_decoder"] = "text_decoder", decoder_of(whole)[0]  # not a submodule


def beyond_text(model: Any) -> list[str]:
    """Return the names of the modules and parameters that no text reaches; empty for a model of text alone."""
    if model.config.get_text_config() is model.config:
        return []
    parts = decoder_of(model)[0], model.get_input_embeddings(), model.get_output_embeddings()
    reached = {id(weight) for part in parts if part is not None for weight in part.parameters()}

    def outside(module: nn.Module, place: str) -> Iterator[str]:
        weights = [*map(id, module.parameters())]
        if weights and reached.isdisjoint(weights):
            yield place.removesuffix(".")
        elif weights:
            own = module.named_parameters(recurse=False)
            yield from (place + name for name, weight in own if id(weight) not in reached)
            for name, child in module.named_children():
                yield from outside(child, f"{place}{name}.")

    return [*outside(model, "")]


def freeze_beyond_text(model: Any) -> None:
    """Exclude what no text reaches from training: DDP would wait for its gradients, FSDP and ZeRO would decay it."""
    whole = without_adapters(model)
    places = beyond_text(whole)
    towers = tuple(f"{place}." for place in places)
    frozen = [one for name, one in whole.named_parameters() if one.requires_grad and f"{name}.".startswith(towers)]
    if frozen and whole not in _warned:  # a warm start freezes before training does
        _warned.add(whole)
        text = "no text reaches %s, which are not trained; to leave them trainable, set ddp_find_unused_parameters"
        logger.warning(text, ", ".join(places))
    for weight in frozen:
        weight.requires_grad = False


def spare_layers(adapters: Any, model: Any) -> Any:
    """Return the configuration of adapters on all linear layers, without the layers that they would harm.

    These are layers that no text reaches, routers, and layers of which only the weights are used, so that an adapter
    has no effect. A configuration that names its layers, or sets ``exclude_modules``, is returned unchanged.
    """
    is_open = not getattr(adapters, "exclude_modules", True)  # some kinds of adapters have no such setting
    if str(getattr(adapters, "target_modules", None)).lower() != "all-linear" or not is_open:
        return adapters
    adapters, spared = copy.copy(adapters), [*_spared(model)]
    adapters.exclude_modules = spared or None
    if spared:
        text = "target_modules='all-linear' leaves out %s: to choose the layers yourself, set exclude_modules"
        logger.warning(text, shown(spared, 160))
    return adapters


def freeze_spared(model: Any) -> None:
    """Exclude from training the adapters that PEFT puts on parameters of excluded modules, such as routers."""
    given = [getattr(one, "exclude_modules", None) or () for one in getattr(model, "peft_config", {}).values()]
    spared = tuple(f"{name}." for names in given if not isinstance(names, str) for name in names)
    for name, weight in without_adapters(model).named_parameters():
        if "lora_" in name and name.startswith(spared):
            weight.requires_grad = False


def _spared(model: Any) -> Iterator[str]:
    modules, towers = dict(model.named_modules()), tuple(f"{name}." for name in beyond_text(model))
    for name, layer in modules.items():
        place, _, own = name.rpartition(".")
        parent = modules[place]
        is_linear = isinstance(layer, nn.Linear | Conv1D)
        is_of_mamba = own in {"out_proj", "dt_proj"} and hasattr(parent, "A_log") and hasattr(parent, "D")
        is_router = own == "gate" or "router" in f"{name} {type(layer).__name__} {type(parent).__name__}".lower()
        is_special = type(layer).__module__.startswith("transformers.models.") or own == "correction_coefs"
        if is_linear and (f"{name}.".startswith(towers) or is_of_mamba or is_router or is_special):
            yield name
        elif is_router and not is_linear and isinstance(getattr(layer, "weight", None), nn.Parameter):
            yield name  # PEFT adapts the parameters of some
