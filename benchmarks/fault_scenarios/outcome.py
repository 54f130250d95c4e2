"""One row of the table that ``benchmarks/faults.py`` prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a scenario requires, and what was observed.

    Attributes:
        scenario: What was done, as in ``"200 SIGKILLs of training, one rank and two"``.
        asked: What must hold.
        seen: What was measured, in figures.
        passed: Whether it held.
        seconds: Wall time of the scenario.
    """

    scenario: str
    asked: str
    seen: str
    passed: bool
    seconds: float
