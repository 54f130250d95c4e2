"""Make trajectories from many conversations: lines of a file, or rows of a dataset."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast

from agentsgym.errors import ConfigError, TemplateError
from agentsgym.recorded.messages import trajectory_from_messages
from agentsgym.recorded.metadata import Rewards
from agentsgym.texts import as_json, sentence_of, shown
from agentsgym.types import Trajectory

_OPTIONS: Final = ("tools", "chat_template_kwargs", "stop_reason", "session_id", "task_data", "info")
_Row = Mapping[str, Any]


def trajectories_from_messages(
    tokenizer: Any,
    rows: str | Path | Iterable[_Row],
    *,
    rewards: Rewards | None = None,
    history: Literal["append", "rerender"] = "append",
) -> list[Trajectory]:
    """Record external conversations, and group them by task.

    A row has ``messages``, and ``rewards`` or ``reward``: one number, or one per answer. It may have further arguments
    of :func:`~agentsgym.recorded.messages.trajectory_from_messages`: ``tools`` (also as JSON text),
    ``chat_template_kwargs``, ``stop_reason``, ``session_id``, ``task_data`` and ``info``; and ``success``. Other keys
    are ignored, and nulls count as missing. Rows belong to one task if they have the same ``task``, or, without it, the
    same ``task_data``, or, without both, the same messages up to the first answer. Tasks are numbered in order of
    appearance (``task_index``), and so are the rollouts of each (``rollout_index``).

    Args:
        tokenizer: The tokenizer, whose chat template formats the conversations; None for trajectories without tokens.
        rows: A file of one JSON object per line, a ``datasets.Dataset``, or any rows.
        rewards: The rewards of rows that have none; None rejects such rows.
        history: The form of prompts, as in :func:`~agentsgym.recorded.messages.trajectory_from_messages`.

    Returns:
        The trajectories, in the order of the rows.

    Raises:
        ConfigError: The file or a row is invalid; the message names the row.
        TemplateError: The chat template rejects the messages of a row, which the message names.
    """
    tasks: dict[str, int] = {}
    counts: dict[int, int] = {}
    trajectories: list[Trajectory] = []
    for where, row in _numbered(rows):
        try:
            options = _options(row)
            index = tasks.setdefault(_task_of(row), len(tasks))
            options |= {"task_index": index, "rollout_index": counts.get(index, 0)}
            trajectory = trajectory_from_messages(
                tokenizer, row.get("messages", ()), _rewards_of(row, rewards), history=history, **options
            )
        except (ConfigError, TemplateError) as error:
            raise type(error)(f"{where}: {sentence_of(error)}") from error
        except RecursionError as error:
            raise ConfigError(f"{where}: it is nested too deeply") from error
        counts[index] = counts.get(index, 0) + 1
        trajectories.append(trajectory)
    return trajectories


def read_json(path: Path) -> Any:
    """Read a file with one JSON value.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else sentence_of(error)  # with the path once
        raise ConfigError(f"{shown(str(path), 300)} cannot be read as JSON: {reason}") from error


def _numbered(rows: Any) -> Iterator[tuple[str, _Row]]:
    """Yield the rows with their names for errors."""
    if isinstance(rows, str | Path):
        yield from _lines(Path(rows))
        return
    if not isinstance(rows, Iterable):
        raise ConfigError(f"rows must be the path of a JSON Lines file, or a list of rows, got {shown(rows)}")
    for index, row in enumerate(cast("Iterable[Any]", rows)):
        yield f"row {index}", _as_row(row, f"row {index}")


def _lines(path: Path) -> Iterator[tuple[str, _Row]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}, line {number}"
                if line.strip():
                    yield where, _as_row(_value_of(line, where), where)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {sentence_of(error)}") from error


def _value_of(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: it must be a JSON object: {sentence_of(error)}") from error


def _as_row(row: Any, where: str) -> _Row:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: it must be an object with 'messages' and 'rewards', got {shown(row)}")
    return {name: value for name, value in cast("_Row", row).items() if value is not None}


def _options(row: _Row) -> dict[str, Any]:
    options = {name: row[name] for name in _OPTIONS if name in row}
    if isinstance(options.get("tools"), str):
        options["tools"] = _value_of(options["tools"].encode(errors="replace"), "its tools")
    if "success" in row:
        if not isinstance(row["success"], bool):
            raise ConfigError(f"success must be true or false, got {shown(row['success'])}")
        info = options.setdefault("info", {})
        if isinstance(info, Mapping):  # otherwise it is rejected by the usual check
            options["info"] = {**cast("_Row", info), "success": row["success"]}
    return options


def _rewards_of(row: _Row, otherwise: Rewards | None) -> Any:
    given = [row[name] for name in ("rewards", "reward") if name in row]
    if len(given) > 1:
        raise ConfigError("it must have 'rewards' or 'reward', got both")
    if not given and otherwise is None:
        raise ConfigError("it must have 'rewards' or 'reward', got neither (pass the argument rewards for such rows)")
    return given[0] if given else otherwise


def _task_of(row: _Row) -> str:
    """The key that rows of one task share, as text."""
    for name in ("task", "task_data"):
        if name in row:
            return _key(name, row[name])
    messages: Any = row.get("messages", ())
    prompt: list[Any] = []
    for message in cast("Iterable[Any]", messages) if isinstance(messages, list | tuple) else ():
        if isinstance(message, Mapping) and cast("_Row", message).get("role") == "assistant":
            break
        prompt.append(message)
    return _key("prompt", prompt)


def _key(name: str, value: Any) -> str:
    return json.dumps(as_json([name, value]), sort_keys=True)
