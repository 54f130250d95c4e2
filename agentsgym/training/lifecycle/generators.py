"""Put the global random generators of Python, NumPy and torch back where they were."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch


def take_generator_states(device: torch.device) -> Callable[[], None]:
    """Read the global generators of Python, NumPy and torch; returns what sets them back."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    device_state = module.get_rng_state() if hasattr(module, "get_rng_state") else None

    def restore() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if device_state is not None:
            module.set_rng_state(device_state)

    return restore


@contextlib.contextmanager
def preserve_rng_state() -> Generator[None]:
    """Restore the global generators of Python, NumPy and torch, so that an evaluation changes no draw after it."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
