"""Load a policy from disk or from the Hub."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import pickle
import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from agentsgym.agents.policy.model import check_rope_types
from agentsgym.agents.policy.packaged import PACKAGED, adapted_base, converted
from agentsgym.errors import AgentsGymError, ConfigError, did_you_mean
from agentsgym.texts import sentence_of, shown

logger = logging.getLogger(__name__)

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
        tokenizer: Any = AutoTokenizer.from_pretrained(converted(name_or_path), **options)
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
    adapters = Path(folder) / "adapter_config.json"
    with naming_the_model(name_or_path):
        if not adapters.is_file():
            check_rope_types(AutoConfig.from_pretrained(folder, **source))
            return AutoModelForCausalLM.from_pretrained(folder, **source, **options), tokenizer
        base: str | None = json.loads(adapters.read_text(encoding="utf-8"))["base_model_name_or_path"]
        if base is None:
            raise ConfigError(f"{adapters} has no base_model_name_or_path: add the path or name of the base model")
        model: Any = AutoModelForCausalLM.from_pretrained(adapted_base(base), **source, **options)
        try:
            model.load_adapter(folder)
        except RuntimeError as error:  # the shapes of tensors differ
            reason = sentence_of(error, 300)
            raise ConfigError(f"the adapters in {folder} do not fit their base model {base}: {reason}") from error
    return model, tokenizer


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


@functools.cache
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
