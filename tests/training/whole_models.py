"""Tiny models of images and text, and folders with them as other programs write them."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from games import GuessNumber, policy
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, PreTrainedModel

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        TEXT
        | {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}
        | {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"rope_parameters": ROTARY | {"mrope_interleaved": True}},
        TOWER | {"model_type": "qwen3_5_vision", "num_heads": 2, "depth": 1, "out_hidden_size": 32},
        {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63},
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        TEXT | {"model_type": "gemma3_text", "sliding_window": 8},
        TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"mm_tokens_per_image": 4, "image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62},
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        TEXT
        | {"model_type": "llama4_text", "intermediate_size_mlp": 32, "num_local_experts": 2}
        | {"router_aux_loss_coef": 0.0},
        TOWER | {"model_type": "llama4_vision_model", "projector_input_dim": 16, "projector_output_dim": 16}
        | {"vision_output_dim": 16, "pixel_shuffle_ratio": 0.5},
        {"image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62},
    ),
}  # fmt: skip


class Lengths(GuessNumber):
    """A game in which nearly every answer has another reward, so that random models learn from it, too."""

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> tuple[Any, float, bool, Any]:
        state, reward, done, info = super()._step_episode(session_id, state, action)
        return state, reward + len(action) / 100, done, info


def configured(folder: Path, model: str, **changes: Any) -> dict[str, Any]:
    """A short run of the command line; changes are those of its settings, apart from those of the model."""
    training = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_turn_tokens": 3,
        "learning_rate": 0.1,
        "disable_tqdm": True,
    }
    few: dict[str, Any] = {"environments": [{"class": Lengths}], "evaluation": {"num_tasks": 1}}
    options = {"model_settings": changes.pop("model_settings", {}), "num_train_tasks": 4}
    return {"model": model, "training": training | changes, **few, **options}


@functools.cache
def _built(kind: str) -> PreTrainedModel:
    name, text, tower, tokens = KINDS[kind]
    config = CONFIG_MAPPING[kind](text_config=text, vision_config=tower, **tokens)
    ends = {"eos_token_id": policy()[1].eos_token_id, "pad_token_id": policy()[1].pad_token_id}
    for one in (config, config.text_config):
        vars(one).update(ends)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return getattr(transformers, name)(config).eval()


def whole(kind: str) -> Any:
    """A model with a tower for images, without a folder."""
    return copy.deepcopy(_built(kind))


def folder_of(model: Any, folder: Path, **changes: Any) -> str:
    """A folder with a model and the tokenizer of the games; changes are those of its configuration."""
    model.save_pretrained(folder)
    policy()[1].save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(folder)


def tensors(folder: Path | str) -> dict[str, torch.Tensor]:
    """All tensors in the files of a folder."""
    return {name: one for file in Path(folder).glob("*.safetensors") for name, one in load_file(file).items()}


def change(folder: str, **changes: Any) -> None:
    """Rewrite tensors of a folder: a function of the name and the tensor, or new ones."""
    (file,) = Path(folder).glob("*.safetensors")
    save_file({**load_file(file), **changes}, file, metadata={"format": "pt"})


def mixed_folder(kind: str, folder: Path) -> str:
    """A folder in bfloat16, with norms in a finer float32, and a tensor that the class of the model never reads."""
    place = folder_of(whole(kind).bfloat16(), folder)
    norms = {name: one.float() + 1e-5 for name, one in tensors(place).items() if name.endswith("norm.weight")}
    change(place, **norms, **{"mtp.fc.weight": torch.ones(2, 2)})
    return place


def check_kept(folder: str, trained: Path) -> None:
    """Compare a trained folder with its source: tensors, their dtypes, and values of what text does not reach."""
    before, after = tensors(folder), tensors(trained)
    assert {name: one.dtype for name, one in before.items()} == {name: one.dtype for name, one in after.items()}
    changed = {name for name, one in before.items() if not one.equal(after[name])}
    assert changed
    assert not [name for name in changed if name.startswith("mtp.") or "vis" in name or "multi_modal" in name]
