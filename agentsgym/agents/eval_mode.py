"""Run a model in evaluation mode for a while: sampling and scoring need it without dropout or checkpointing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def evaluation_mode(model: Any) -> Generator[None]:
    """Switch a model to evaluation and back, module by module: a part that was frozen stays so."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
