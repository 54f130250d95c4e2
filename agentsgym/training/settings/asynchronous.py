"""The setting that says how far rollouts may run ahead of training."""

from __future__ import annotations

from dataclasses import dataclass

from agentsgym.fields import is_int
from agentsgym.training.settings.fields import number


@dataclass
class AsyncSettings:
    """Whether rollouts wait for training.

    Attributes:
        max_staleness: The most updates that may lie between the weights that sampled a turn and those that are first
            trained on it; an update is a generation batch that was trained on. 0 plays each batch after the last
            update; 1 plays the next batch meanwhile; with more, long episodes hold up nobody until they are as old.
    """

    max_staleness: int = number(
        0, "Updates by which rollouts may be behind.", expected="a non-negative int", valid=is_int(0)
    )
