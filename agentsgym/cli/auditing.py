"""Audit the rollouts in a store against their environments and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final, cast

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.datasets.registry import find
from agentsgym.errors import AgentsGymError
from agentsgym.record_audit import audit
from agentsgym.record_audit.report import AuditReport
from agentsgym.store.values import from_json

if TYPE_CHECKING:
    from agentsgym.store.reader import RolloutStore

_CHUNK: Final = 512  # rollouts in memory at once
_UNKNOWN: Final[dict[str, Any]] = {"turn_credit": None, "token_credit": None, "final_reward_is_sum": False}


def audit_store(store: RolloutStore, vocabulary_size: int | None = None) -> tuple[AuditReport, list[str]]:
    """Audit all rollouts in a store; returns the report, and the unknown environments, whose rewards are not checked.

    Args:
        store: The rollouts; problems are reported by their index in the store.
        vocabulary_size: Exclusive upper bound of token ids; None for no limit.

    Raises:
        StoreError: A file is missing or damaged.
    """
    table = store.table(["env_class_path", "env_config"])
    columns = [cast("list[str | None]", table.column(name).to_pylist()) for name in table.column_names]
    rows: dict[tuple[str | None, ...], list[int]] = {}
    for row, key in enumerate(zip(*columns, strict=True)):
        rows.setdefault(key, []).append(row)
    reports: list[AuditReport] = []
    unknown: list[str] = []
    for (path, config), env_rows in rows.items():
        expected = _expected_rewards(path, config)
        if expected is _UNKNOWN:
            unknown.append(path or "an unnamed environment")
        for start in range(0, len(env_rows), _CHUNK):
            part = env_rows[start : start + _CHUNK]
            report = audit([store[row] for row in part], vocabulary_size=vocabulary_size, **expected)
            problems = tuple(replace(one, trajectory=part[one.trajectory]) for one in report.problems)
            reports.append(replace(report, problems=problems))
    counts = {one.name: sum(getattr(report, one.name) for report in reports) for one in fields(AuditReport)[:-1]}
    problems = sorted((one for report in reports for one in report.problems), key=lambda one: one.trajectory)
    return AuditReport(**counts, problems=tuple(problems)), list(dict.fromkeys(unknown))


def _expected_rewards(path: str | None, config: str | None) -> dict[str, Any]:
    """Return where an environment's configuration places rewards, and whether the final reward is their sum."""
    if path is None or config is None:
        return _UNKNOWN
    try:
        env_class = find(path)
    except AgentsGymError:
        return _UNKNOWN  # a user's class is not imported just because a file names it
    known = from_json(config)
    if not isinstance(known, Mapping):
        return _UNKNOWN
    settings = cast("Mapping[str, Any]", known)
    subclasses = env_class.__mro__[: env_class.__mro__.index(MultistepEnv)]
    overridden = {name for one in subclasses for name in vars(one)}
    is_custom = "_calculate_rewards" in overridden
    return {
        "turn_credit": None if is_custom else settings.get("turn_credit"),
        "token_credit": None if is_custom else settings.get("token_credit"),
        "final_reward_is_sum": "_final_reward" not in overridden,
    }
