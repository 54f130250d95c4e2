"""Tiny random models of the families in families.yaml.

Windows, chunks and selections are shorter than the conversations that are played: what begins to act only beyond them
would otherwise go untested.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from agentsgym.testing import chat_tokenizer

_FACTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text(encoding="utf-8"))
WHOLE: dict[str, dict[str, Any]] = _FACTS["whole"]
TEXT: dict[str, dict[str, Any]] = {**{name: {} for name in _FACTS["plain"]}, **_FACTS["families"]}
FAMILIES = sorted([*TEXT, *WHOLE])
RECURRENT: list[str] = _FACTS["recurrent"]
LEFT_OUT: dict[str, list[str]] = _FACTS["left_out"]

_MARKS = {
    "<|image_pad|>": ("image_token_id", "image_token_index"),
    "<|vision_start|>": ("vision_start_token_id", "boi_token_index", "boi_token_id"),
    "<|vision_end|>": ("vision_end_token_id", "eoi_token_index", "eoi_token_id"),
    "<|video_pad|>": ("video_token_id",),
    "<|audio_pad|>": ("audio_token_id",),
}
TOKENIZER: Any = chat_tokenizer("chatml")
TOKENIZER.add_tokens([*_MARKS], special_tokens=True)
_ENDS = {name: getattr(TOKENIZER, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
_IDS = {name: TOKENIZER.convert_tokens_to_ids(mark) for mark, names in _MARKS.items() for name in names}
_SIZES = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), len(TOKENIZER))


def type_of(family: str) -> str:
    """The type of a family's configuration."""
    return family.split(" ", maxsplit=1)[0]


def build(family: str, seed: int = 0) -> Any:
    """Build a model in float32 whose logits depend on the whole context, which those of an untrained one hardly do."""
    torch.manual_seed(seed)
    loader: Any = AutoModelForImageTextToText if family in WHOLE else AutoModelForCausalLM
    model = loader.from_config(config_of(family)).float().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and weight.std() < 0.1 and not name.endswith("A_log"):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.12)
            elif weight.dim() == 1 and "dt_bias" not in name and any(one in name for one in ("bias", "norm", "sinks")):
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    return model


def config_of(family: str) -> Any:
    """Build the configuration of a family."""
    kind: Any = CONFIG_MAPPING[type_of(family)]
    return kind(**(_whole(kind, WHOLE[family]) if family in WHOLE else _small(kind) | TEXT[family]))


def _whole(kind: Any, facts: dict[str, Any]) -> dict[str, Any]:
    own, text_family = kind.sub_configs.get("text_config"), facts.get("text")
    text = own if getattr(own, "model_type", "") else CONFIG_MAPPING[type_of(str(text_family))]
    options = _small(text) | TEXT.get(str(text_family), {}) | facts.get("options", {}) | {"model_type": text.model_type}
    parts: dict[str, Any] = {"text_config": options, "mm_tokens_per_image": 4, "audio_config": None, **_IDS, **_ENDS}
    if (vision := facts.get("vision")) is not None:
        tower = CONFIG_MAPPING[vision["model_type"]] if "model_type" in vision else kind.sub_configs["vision_config"]
        parts["vision_config"] = _known(tower, _FACTS["vision"]) | vision | {"model_type": tower.model_type}
    return _known(kind, parts, *kind.sub_configs)


def _small(kind: Any) -> dict[str, Any]:
    return _known(kind, {**_FACTS["small"], **_SIZES, **_ENDS})


def _known(kind: Any, options: dict[str, Any], *others: str) -> dict[str, Any]:
    names = {*inspect.signature(kind.__init__).parameters, *(kind.attribute_map or ()), *others}
    names |= {name for base in kind.__mro__ for name in getattr(base, "__annotations__", ())}
    return {name: value for name, value in options.items() if name in names}
