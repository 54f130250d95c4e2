"""Run a model temporarily in evaluation mode: sampling and scoring require no dropout and no checkpointing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def evaluation_mode(model: Any) -> Generator[None]:
    """Switch a model to evaluation mode, and restore the mode of each module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
