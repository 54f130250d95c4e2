"""Save a policy with what belongs to it in the folder that it was loaded from: a processor, tensors, their dtypes."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from transformers import ProcessorMixin
from transformers.utils import CONFIG_NAME, IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME
from transformers.utils.hub import cached_file  # pyright: ignore[reportUnknownVariableType]

_METADATA: Final = {"format": "pt"}
UNREAD: Final = "model-unread.safetensors"
_open: Any = partial(safe_open, framework="pt")
_Tensors = dict[str, tuple[Path, Any]]


def source_of(model: Any) -> str:
    """Return the folder or the name on the Hub of a model, which may be given by it; empty if it has none."""
    return model if isinstance(model, str) else str(getattr(model.config, "name_or_path", None) or "")


def save_rest(given: Any, model: Any, folder: Path, source: str = "", *, keep: bool = False) -> None:
    """Add to the folder of a trained model what its class and its tokenizer do not write.

    This is what ``AutoProcessor`` reads, of the processor given or of the source (the folder or name of the model), and
    the source's tensors that the class does not read; with ``keep``, also its dtypes and unchanged values.
    """
    source, is_given = source or source_of(model), isinstance(given, ProcessorMixin)
    if is_given or model.config.get_text_config() is not model.config:
        with tempfile.TemporaryDirectory() as place:
            if is_given:
                given.save_pretrained(place)  # pyright: ignore[reportUnknownMemberType]
            for name in (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME):
                if file := _find(place if is_given else source, name):
                    shutil.copyfile(file, folder / name)
    _restore(model, folder, source, keeps_dtypes=keep)


def _find(source: str, name: str) -> Path | None:
    try:
        return Path(str(cached_file(source, name, local_files_only=True))) if source else None
    except OSError:  # the file or the folder does not exist
        return None


def _restore(model: Any, folder: Path, source: str, *, keeps_dtypes: bool) -> None:
    place, own = _find(source, CONFIG_NAME), folder / CONFIG_NAME
    if place is None or not own.is_file():  # adapters alone have none
        return
    config, values = (json.loads(file.read_text(encoding="utf-8")) for file in (place, own))
    if config.get("architectures") != values.get("architectures"):
        return
    old, new = _tensors(place.parent), _tensors(folder)
    if keeps_dtypes:
        values["dtype"] = config.get("dtype") or config.get("torch_dtype") or values["dtype"]
        _convert(old, new, getattr(torch, values["dtype"]))
        own.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    known, ignored = getattr(model, "unread_tensors", ()), "|".join(model._keys_to_ignore_on_load_unexpected or ["$^"])
    names = [name for name in old.keys() - new.keys() if name in known or re.search(ignored, name)]
    if names:
        save_file({name: old[name][1].get_tensor(name) for name in names}, folder / UNREAD, metadata=_METADATA)


def _convert(old: _Tensors, new: _Tensors, usual: torch.dtype) -> None:
    """Convert written tensors to the dtypes that they had, or the usual one; what differs only by rounding stays."""
    for file in {file for file, _ in new.values()}:
        tensors = load_file(file)
        for name, tensor in tensors.items():
            was = old[name][1].get_tensor(name) if name in old else tensor.new_empty(0, dtype=usual)
            if tensor.is_floating_point() and was.is_floating_point() and was.itemsize > 1:  # not a quantized one
                # A CPU that is slow in bfloat16 plays in float32 what was loaded in bfloat16.
                loaded = (was.to(tensor.dtype), was.to(usual).to(tensor.dtype))
                tensors[name] = was if any(map(tensor.equal, loaded)) else tensor.to(was.dtype)
        save_file(tensors, file.with_suffix(".new"), metadata=_METADATA)  # the tensors may be views of the file
        file.with_suffix(".new").replace(file)


def _tensors(folder: Path) -> _Tensors:
    """Return the file of each tensor in a folder, by its name, as a path and opened."""
    files = [(file, _open(file)) for file in sorted(folder.glob("*.safetensors"))]
    return {name: (file, one) for file, one in files for name in one.keys()}  # noqa: SIM118
