"""Save a policy with what belongs to it in the folder that it was loaded from: a processor, tensors, their dtypes."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from transformers import ProcessorMixin
from transformers.utils import CONFIG_NAME, IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME
from transformers.utils.hub import cached_file  # pyright: ignore[reportUnknownVariableType]

_FLOATS: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_METADATA: Final = {"format": "pt"}
_UNREAD: Final = "model-unread.safetensors"
_open: Any = partial(safe_open, framework="pt")
_Tensors = dict[str, tuple[Path, str]]


def source_of(model: Any) -> str:
    """Return the folder or the name on the Hub of a model, which may be given by it; empty if it has none."""
    return model if isinstance(model, str) else str(getattr(model.config, "name_or_path", None) or "")


def save_processor(given: Any, model: Any, folder: Path) -> None:
    """Write what ``AutoProcessor`` reads beside a tokenizer: of the processor given, or of the folder of a model."""
    is_given = isinstance(given, ProcessorMixin)
    if not is_given and model.config.get_text_config() is model.config:
        return
    with tempfile.TemporaryDirectory() as place:
        if is_given:
            given.save_pretrained(place)  # pyright: ignore[reportUnknownMemberType]
        for name in (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME):
            if file := _find(place if is_given else source_of(model), name):
                shutil.copyfile(file, folder / name)


def _find(source: str, name: str) -> Path | None:
    try:
        return Path(str(cached_file(source, name))) if source else None
    except OSError:  # the file or the folder does not exist
        return None


def restore(model: Any, folder: Path, source: str, *, keeps_dtypes: bool) -> None:
    """Copy tensors that the class of a trained model does not read from its source, whose dtypes may be kept, too."""
    place, own = _find(source, CONFIG_NAME), folder / CONFIG_NAME
    if place is None or not own.is_file():  # adapters alone have none
        return
    config, old, new = json.loads(place.read_text(encoding="utf-8")), _tensors(place.parent), _tensors(folder)
    if config.get("architectures") != [type(model).__name__]:
        return
    if keeps_dtypes and old:
        _convert(old, new)
        values = json.loads(own.read_text(encoding="utf-8"))
        values["dtype"] = config.get("dtype") or config.get("torch_dtype") or values["dtype"]
        own.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    ignored = re.compile("|".join(model._keys_to_ignore_on_load_unexpected or ["$^"]))
    unread: dict[str, torch.Tensor] = {}
    for name in old.keys() - new.keys():
        file, _ = old[name]
        if name in getattr(model, "unread_tensors", ()) or file.name == _UNREAD or ignored.search(name):
            unread[name] = _open(file).get_tensor(name)
    if unread:
        save_file(unread, folder / _UNREAD, metadata=_METADATA)


def _convert(old: _Tensors, new: _Tensors) -> None:
    """Convert written tensors to the dtypes that they had, or, under a new name, to the dtype that most had."""
    usual, _ = Counter(dtype for _, dtype in old.values()).most_common(1)[0]
    for file in {file for file, _ in new.values()}:
        tensors = load_file(file)
        for name, tensor in tensors.items():
            dtype = _FLOATS.get(old[name][1] if name in old else usual)
            tensors[name] = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        save_file(tensors, file.with_suffix(".new"), metadata=_METADATA)  # the tensors may be views of the file
        file.with_suffix(".new").replace(file)


def _tensors(folder: Path) -> _Tensors:
    """Return the file and the dtype of each tensor in a folder, by its name."""
    files = [(file, _open(file)) for file in sorted(folder.glob("*.safetensors"))]
    return {name: (file, one.get_slice(name).get_dtype()) for file, one in files for name in one.keys()}  # noqa: SIM118
