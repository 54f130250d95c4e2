"""Hide tokens from TRL's fused head, so that it computes only the log-probabilities that are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Model = Callable[..., Any]


def mask_labels(model: Model, labeled: torch.Tensor) -> Model:
    """Call ``model`` with every other label ignored, so that the fused head skips those tokens.

    Args:
        model: Called by TRL with ``labels`` of shape (B, L).
        labeled: (B, L), 1 on the tokens whose log-probability is needed.
    """

    def call(**kwargs: Any) -> Any:
        labels = kwargs["labels"].masked_fill(labeled == 0, -100)
        return model(**{**kwargs, "labels": labels})

    return call
