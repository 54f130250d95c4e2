"""Find which rollouts of a store are meant, and keep games in one."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentsgym.cli.console import UsageError
from agentsgym.envs.datasets.stored_columns import stored_columns
from agentsgym.errors import StoreError, did_you_mean
from agentsgym.store.reader import RolloutStore
from agentsgym.store.schema import INTS, OWN_INTS, OWN_TEXTS
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.types import Trajectory

_CONDITION: Final = re.compile(r"\s*(\w+)\s*(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
_OPERATORS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_KINDS: Final[dict[str, type]] = {
    **dict.fromkeys((*OWN_TEXTS, "session_id", "stop_reason", "error"), str),
    **dict.fromkeys((*OWN_INTS, *INTS, "seed", "num_turns", "num_tokens", "num_agent_tokens"), int),
    "final_reward": float,
    "success": bool,
}
COLUMNS: Final = tuple(_KINDS)
"""The columns that ``--where`` knows: of one number, text or truth value each."""


def open_store(path: Path, where: Sequence[str] | None = None) -> RolloutStore:
    """Open a store, with the rollouts that pass all conditions.

    Raises:
        UsageError: There is no store, it has no rollout, or none passes, or a condition is none.
    """
    try:
        store = RolloutStore(path)
    except StoreError as error:
        raise UsageError(sentence_of(error)) from error
    conditions = [_condition(text) for text in where or ()]
    if not len(store):
        unread = f": none of its {len(store.skipped)} parquet files can be read" if store.skipped else ""
        raise UsageError(f"there is no rollout in {path}{unread}")
    found = store
    for column, passes in conditions:
        found = found.filter(**{column: passes})
    if not len(found):
        raise UsageError(f"no rollout of the {len(store)} in {path} is one --where {' --where '.join(where or ())}")
    return found


def check_place(path: Path | None, *, resume: bool = False) -> None:
    """Raise before anything is played where games cannot be kept.

    Raises:
        UsageError: There can be no store at that place, or nothing says where to resume.
    """
    if path is None:
        if resume:
            raise UsageError("--resume needs the store to resume from: --store PATH")
        return
    try:
        RolloutStore.writer(path).close()
    except StoreError as error:
        raise UsageError(sentence_of(error)) from error


def num_kept(path: Path, agent: str) -> int:
    """How many games of an agent a store holds, failed ones included."""
    return len(RolloutStore(path).filter(agent=agent))


def keep(path: Path, trajectory: Trajectory, env: MultistepEnv, agent: str) -> None:
    """Keep a game that was played in the terminal.

    Raises:
        StoreError: It cannot be written.
    """
    with RolloutStore.writer(path, source="play", agent=agent) as writer:
        writer.add(
            trajectory,
            **stored_columns(env, trajectory),
            tokenizer=writer.keep_tokenizer(env.tokenizer),
        )


def _condition(text: str) -> tuple[str, Callable[[Any], bool]]:
    """Read ``COLUMN=VALUE``: the column, and whether a value of it passes."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UsageError(f"--where takes COLUMN=VALUE, or another of {', '.join(_OPERATORS)}; got {shown(text)}")
    column, sign, given = match[1], match[2], match[3].strip()
    if column not in COLUMNS:
        raise UsageError(f"--where knows no column {shown(column)}{did_you_mean(column, COLUMNS)}")
    wanted, compare = _value(column, given), _OPERATORS[sign]
    if sign in {"=", "!="}:
        return column, lambda value: compare(value, wanted)
    if wanted is None:
        raise UsageError(f"--where {text}: null, which is what is not known, can only be compared by = and !=")
    return column, lambda value: value is not None and compare(value, wanted)


def _value(column: str, text: str) -> Any:
    """Read a value as the column has it; ``null`` is what is not known."""
    kind = _KINDS[column]
    if text == "null":
        return None
    if kind is str:
        return text
    if kind is bool:
        if text not in {"true", "false"}:
            raise UsageError(f"--where {column} takes true, false or null, got {shown(text)}")
        return text == "true"
    try:
        return kind(text)
    except ValueError as error:
        raise UsageError(f"--where {column} takes a number or null, got {shown(text)}") from error
