"""Write a page that holds everything it shows, in one file that can be sent around."""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from agentsgym.credit.rewards import TURN_CREDITS
from agentsgym.credit.settings import CreditSettings
from agentsgym.errors import ConfigError
from agentsgym.viewer.answers import Answers
from agentsgym.viewer.page import Assets, begin, data_element, end
from agentsgym.viewer.plain import dumped
from agentsgym.viewer.what_if import Request, available, options_of

if TYPE_CHECKING:
    from agentsgym.store.reader import RolloutStore

WRITTEN_LIMIT: Final = 1000
_PER_CHUNK: Final = 32  # rollouts; a task group stays together


def write_page(
    store: RolloutStore, path: str | Path, *, limit: int = WRITTEN_LIMIT, tokenizer: str | Path | None = None
) -> Path:
    """Write rollouts with their tokens, groups and what-ifs as one page; a file there is replaced, whole or not at all.

    Args:
        store: The rollouts: a store, or a part of one, as ``store.filter`` gives it.
        path: The file.
        limit: The newest of so many rollouts.
        tokenizer: A ``tokenizer.json``, or its folder, for stores that keep none.

    Returns:
        The file.

    Raises:
        ConfigError: ``limit`` is not positive.
        StoreError: A part of the store is gone or damaged, or there is no tokenizer at that place.
        OSError: The file cannot be written; what was there is as it was.
    """
    answers = Answers(store, limit=limit, mode="written", tokenizer=None if tokenizer is None else Path(tokenizer))
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        with unfinished.open("x", encoding="utf-8", newline="\n") as file:
            _write(file, answers)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return path


def _write(file: IO[str], answers: Answers) -> None:
    assets = Assets.read()
    chunks = _chunks(answers)
    file.write(begin(assets, answers.title, "written"))
    listed = answers.list()
    chunk_of = {
        row: index for index, groups in enumerate(chunks) for key in groups for row in answers.index.groups[key]
    }
    listed["columns"] = listed["columns"] | {"chunk": [chunk_of[row] for row in answers.index.rows]}
    file.write(data_element("list", dumped(listed), "application/json"))
    for index, groups in enumerate(chunks):
        file.write(data_element(f"chunk-{index}", _packed(_chunk(answers, groups))))
    file.write(data_element("chunk-turns", _packed(answers.turns())))
    file.write(end(assets))


def _chunks(answers: Answers) -> list[list[int]]:
    """Task groups that stand in one chunk, in the order of the list."""
    chunks: list[list[int]] = []
    size = _PER_CHUNK
    for key, rows in answers.index.groups.items():
        if size + len(rows) > _PER_CHUNK:
            chunks.append([])
            size = 0
        chunks[-1].append(key)
        size += len(rows)
    return chunks


def _chunk(answers: Answers, groups: Sequence[int]) -> dict[str, Any]:
    rows = sorted(row for key in groups for row in answers.index.groups[key])
    return {
        "rollouts": {str(row): answers.rollout(row) for row in rows},
        "groups": {str(key): answers.group(key) | {"what_ifs": _what_ifs(answers, key)} for key in groups},
    }


def _what_ifs(answers: Answers, key: int) -> list[dict[str, Any]]:
    """Those of the chosen set that can be computed."""
    found: list[dict[str, Any]] = []
    for request in chosen(answers.batch(key).settings):
        with contextlib.suppress(ConfigError):  # of these rollouts the estimator misses something
            one = answers.what_if_of(key, request)
            found.append({name: one[name] for name in ("settings", "advantages", "rows", "compared", "note")})
    return found


def chosen(run: CreditSettings | None) -> Iterator[Request]:
    """The what-ifs that a written page holds.

    The run's own settings first, where they are known; every estimator with its own defaults, scaled by group and not
    at all; the choices of its options; and the run's estimator with the other turn credits.

    Args:
        run: The settings of the run; None where they are not known.
    """
    base = replace(run, value_head=None) if run is not None else CreditSettings()
    names = available()
    seen: list[Request] = []
    if run is not None and run.advantage_estimator in names:
        seen += _allowed(base)
        seen += [replace(one, turn_credit=credit) for one in seen[:1] for credit in TURN_CREDITS]
    for name in names:
        plain = replace(base, advantage_estimator=name, options={}, potential_weight=0.0)
        options = options_of(name).items()
        others = [
            {option: value} for option, one in options for value in one["choices"] or () if value != one["default"]
        ]
        for scale in ("group", "none"):
            seen += _allowed(replace(plain, scale_rewards=scale))
        for other in others:
            seen += _allowed(replace(plain, options=other))
    if not (run is not None and run.advantage_estimator in names):
        seen += [Request(settings=CreditSettings(), turn_credit=credit) for credit in TURN_CREDITS]
    return iter([one for index, one in enumerate(seen) if one not in seen[:index]])


def _allowed(settings: CreditSettings) -> list[Request]:
    """A request of the settings; none where a run's own option is none of those that can be asked for."""
    try:
        return [Request(settings=settings)]
    except ConfigError:
        return []


def _packed(value: Any) -> str:
    """JSON as a zlib stream as base64: what ``DecompressionStream("deflate")`` inflates."""
    return base64.b64encode(zlib.compress(dumped(value).encode("ascii"), 6)).decode("ascii")
