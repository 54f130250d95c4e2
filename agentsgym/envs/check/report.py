"""The report of a check of an environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem of an environment.

    Attributes:
        check: Name of the check, such as ``"global-random"``.
        severity: ``"error"`` if training or evaluation would be wrong; ``"warning"`` if it would be costly, or may be
            wrong.
        text: The problem and its fix, in a sentence.
        place: File and line of the hook concerned; empty if there is none.
    """

    check: str
    severity: Severity
    text: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.severity} [{self.check}]{f' {self.place}' if self.place else ''}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvReport:
    """The findings of :func:`agentsgym.check_env`.

    Attributes:
        findings: The findings, errors first.
        num_episodes: Number of episodes that were played.
        num_turns: Number of turns in these episodes.
    """

    findings: Sequence[Finding]
    num_episodes: int
    num_turns: int

    @property
    def errors(self) -> list[Finding]:
        """The findings that are errors."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def __str__(self) -> str:
        played = f"{self.num_episodes} episodes, {self.num_turns} turns"
        if not self.findings:
            return f"no problems in {played}"
        num_errors = len(self.errors)
        counts = f"{num_errors} errors and {len(self.findings) - num_errors} warnings in {played}"
        return "\n".join([f"{counts}:", *map(str, self.findings)])
