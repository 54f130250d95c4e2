"""Load a policy from disk or from the Hub."""

from __future__ import annotations

import itertools
import json
import logging
import pickle
import re
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils.hub import LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE

from agentsgym.agents.policy.model import check_rope_types
from agentsgym.agents.policy.packaged import PACKAGED, adapted_base, converted
from agentsgym.agents.policy.saving import UNREAD
from agentsgym.agents.policy.text_path import decoder_of
from agentsgym.errors import AgentsGymError, ConfigError, did_you_mean
from agentsgym.texts import sentence_of, shown

logger = logging.getLogger(__name__)

_ADAPTERS = "adapter_config.json"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # anything else can only be a path


@contextmanager
def naming_the_model(name_or_path: str) -> Generator[None]:
    """Name the model in the error if a folder or a name on the Hub has no usable model.

    Raises:
        ConfigError: The name can only be a path but does not exist, or the block raised.
    """
    place, folder = f"no model can be loaded from {shown(name_or_path)}", Path(name_or_path)
    inside = next((file.parent for file in sorted(folder.glob("*/config.json"))), None)
    if inside is not None and not (folder / "config.json").exists():
        place += f" (did you mean {inside}?)"
    if not folder.exists():
        place += f" (no such folder{did_you_mean(name_or_path, PACKAGED)})"
        if name_or_path == "tiny":
            raise ConfigError(f"{place}: pass tiny_policy(…)[0], a model")
        if not _HUB_NAME.fullmatch(name_or_path):
            raise ConfigError(f"{place}, nor can it be a name on the Hub, such as 'Qwen/Qwen3-0.6B'")
    try:
        yield
    except AgentsGymError:
        raise
    except pickle.UnpicklingError as error:
        reason = "its weights are damaged, or a pickle that could run code: save them with save_pretrained"
        raise ConfigError(f"{place}: {reason}") from error
    except Exception as error:  # a damaged file may raise anything
        raise ConfigError(f"{place}: {' '.join(sentence_of(error, 300).split())}") from error


def load_tokenizer(name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load a tokenizer; its padding token defaults to the end-of-sequence token.

    Args:
        name_or_path: A folder, a name on the Hub, a packaged model
            (:func:`~agentsgym.agents.policy.packaged.packaged_model`) or a GGUF file.
        revision: Revision of a name on the Hub.
        trust_remote_code: Whether code that comes with the tokenizer may run.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with naming_the_model(name_or_path):
        folder = converted(name_or_path)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options)
    template = Path(folder) / LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE
    if template.is_file():  # only processors read it
        tokenizer.chat_template = json.loads(template.read_text(encoding="utf-8"))["chat_template"]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False, **options: Any
) -> tuple[Any, Any]:
    """Load a model, with ``options`` such as ``dtype`` for its ``from_pretrained``, and its tokenizer.

    The other arguments are those of :func:`load_tokenizer`.
    """
    source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = load_tokenizer(name_or_path, **source)
    folder = converted(name_or_path)
    adapters = Path(folder) / _ADAPTERS
    with naming_the_model(name_or_path):
        if not adapters.is_file():
            return load_weights(folder, **source, **options), tokenizer
        base: str | None = json.loads(adapters.read_text(encoding="utf-8"))["base_model_name_or_path"]
        if base is None:
            raise ConfigError(f"{adapters} has no base_model_name_or_path: add the path or name of the base model")
        model = load_weights(adapted_base(base), **source, **options)
        try:
            problem = _load_adapters(model, adapters.parent)
        except ValueError:
            problem = "they are on layers that it does not have"
        except RuntimeError as error:  # the shapes of tensors differ
            problem = sentence_of(error, 300)
        if problem:
            raise ConfigError(f"the adapters in {folder} do not fit their base model {base}: {problem}")
    return model, tokenizer


def load_weights(folder: str, load: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Load a model as the class that its configuration names, or, if that cannot generate, as its ``AutoModel``.

    ``load`` is called with the folder, the class as ``architecture``, and the options; by default, ``from_pretrained``.

    Raises:
        ConfigError: The class or the kind of its RoPE is unknown, the model has an encoder, or the weights are those of
            another class.
    """
    source = {name: options[name] for name in ("revision", "trust_remote_code") if name in options}
    config = cast("Any", AutoConfig).from_pretrained(folder, **source)
    check_rope_types(config)
    names = config.architectures or AutoModelForCausalLM.__name__
    name: str = names if isinstance(names, str) else names[0]
    named: Any = getattr(transformers, name, None)
    if named is None and not getattr(config, "auto_map", None):  # code that comes with the model
        raise ConfigError(
            f"transformers {transformers.__version__} has no class {shown(name)}, which config.json in {folder} "
            "names in 'architectures': install a version that has it"
        )
    if config.is_encoder_decoder:
        raise ConfigError(f"PolicyAgent requires a decoder-only model, got {name}")
    can_generate = getattr(named, "can_generate", bool)()
    is_fitting = can_generate and isinstance(config, getattr(named, "config_class", None) or object)
    kind: Any = named if is_fitting else cast("Any", AutoModelForCausalLM)
    start: Any = kind.from_pretrained if load is None else partial(load, architecture=named and kind)
    model, found = start(folder, output_loading_info=True, **options)
    missing = [] if is_deepspeed_zero3_enabled() else sorted(found["missing_keys"])  # it loads them in another way
    if wrong := missing or _beside_weights(model, found["unexpected_keys"]):
        raise ConfigError(
            f"the weights in {folder} are not those of a {type(model).__name__}, which its config.json describes: "
            f"{len(wrong)} tensors are {'missing' if missing else 'left over'} ({shown(wrong, 120)})"
        )
    unread = Path(folder) / UNREAD
    model.unread_tensors = {*found["unexpected_keys"], *(safe_open(unread, "pt").keys() if unread.is_file() else ())}
    return model


def _beside_weights(model: Any, unexpected: Iterable[str]) -> list[str]:
    """Return the names of unread tensors that belong to the model's layers, such as the biases of another class."""
    if hasattr(model.config, "quantization_config"):
        return []
    layers = {name for name, layer in model.named_modules() if isinstance(getattr(layer, "weight", None), nn.Parameter)}
    return sorted(key for key in unexpected if key.rpartition(".")[0] in layers)


def _load_adapters(model: Any, folder: Path) -> str | None:
    """Load adapters, also those of the text-only class on the whole one or reversed, and return what does not fit."""
    file = folder / "adapter_model.safetensors"
    weights = load_file(file) if file.is_file() else {}
    decoder, name = decoder_of(model)
    layers = "|".join(child for child, _ in decoder.named_children())
    prefix = re.compile(rf"base_model\.model\.(?:(?:model|language_model|text_model)\.){{1,2}}(?=(?:{layers})\.)")
    renamed = {prefix.sub(f"base_model.model.{name}.", key): tensor for key, tensor in weights.items()}
    with tempfile.TemporaryDirectory() as place:
        if renamed.keys() != weights.keys():
            modules = sorted((module for module, _ in model.named_modules()), key=len, reverse=True)
            inner = [key.removeprefix("base_model.model.") for key in renamed]
            targets = {next(module for module in modules if key.startswith(module)) for key in inner}
            config = json.loads((folder / _ADAPTERS).read_text(encoding="utf-8"))
            config |= {"target_modules": sorted(targets), "exclude_modules": None}
            for kind in ("alpha_pattern", "rank_pattern"):
                given: dict[str, Any] = config.get(kind) or {}
                paths = {key: prefix.sub(f"base_model.model.{name}.", f"base_model.model.{key}") for key in given}
                config[kind] = {paths[key].removeprefix("base_model.model."): one for key, one in given.items()}
            folder = Path(place)
            (folder / _ADAPTERS).write_text(json.dumps(config), encoding="utf-8")
            save_file(renamed, folder / file.name)
        found = model.load_adapter(str(folder))
    misfits = sorted({*found.missing_keys, *found.unexpected_keys})
    return f"{len(misfits)} tensors have no counterpart ({shown(misfits, 120)})" if misfits else None


def load_policy(name_or_path: str) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load a policy for sampling: on the accelerator if there is one, in its saved precision.

    On a CPU that :func:`is_slow_in_bfloat16`, bfloat16 weights are converted to float32.

    Raises:
        ConfigError: The folder or name does not exist, or has no causal language model with a tokenizer.
    """
    model, tokenizer = load_model(name_or_path, dtype="auto")
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # a CUDA build may find no GPU
    if accelerator is not None:
        return model.to(accelerator), tokenizer
    return (model.float() if model.dtype == torch.bfloat16 and is_slow_in_bfloat16() else model), tokenizer


@cache
def is_slow_in_bfloat16() -> bool:
    """Whether this CPU multiplies matrices in bfloat16 at less than a third of the speed of float32.

    Without instructions for it, bfloat16 can be 40 times slower; with AVX512-BF16 or AMX, it is 3 to 4 times faster.
    """

    def seconds(dtype: torch.dtype) -> float:
        rows, weights = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        times = [time.perf_counter()]
        for _ in range(4):
            torch.matmul(rows, weights)
            times.append(time.perf_counter())
        return min(end - start for start, end in itertools.pairwise(times))

    return seconds(torch.bfloat16) > 3 * seconds(torch.float32)


def warn_of_slow_bfloat16(model: Any, *, is_autocast: bool) -> None:
    """Warn before training on a CPU that :func:`is_slow_in_bfloat16`, in bfloat16 weights or under autocast."""
    if model.device.type == "cpu" and (is_autocast or model.dtype == torch.bfloat16) and is_slow_in_bfloat16():
        logger.warning(
            "this CPU computes bfloat16 many times slower than float32: load the model with dtype='float32' and set "
            "bf16=False"
        )


def limit_threads(model: Any) -> None:
    """Compute with one thread if the model is on the CPU and has fewer than 5 million parameters: that is faster."""
    if model.device.type == "cpu" and model.num_parameters() < 5_000_000:
        torch.set_num_threads(1)
