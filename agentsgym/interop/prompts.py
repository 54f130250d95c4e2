"""Serialize tasks as prompts, the only data that TRL passes to a rollout function, and parse them back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import datasets

from agentsgym.envs.dataset_rows import ROW_COLUMNS, DatasetRow
from agentsgym.errors import ConfigError, TaskError
from agentsgym.seeding import derive_seed
from agentsgym.texts import shown

_MARK: Final = "agentsgym_row"
_COLUMNS: Final = (*ROW_COLUMNS, "environment")
_REMEDY: Final = "make the dataset with agentsgym.interop.prompt_dataset(rows)"


def as_prompt(row: Mapping[str, Any]) -> str:
    """Serialize a dataset row, or a bare task, as the text of a prompt.

    The policy never sees this text, only the prompts of the environment. Equal rows have equal texts.

    Args:
        row: A row with ``task_data`` and, if environments are built from rows, ``env_class_path`` and ``env_config``;
            or just the task.

    Raises:
        TaskError: The row is not a mapping, or contains a value that JSON cannot represent.

    >>> as_prompt({"seed": 7})
    '{"agentsgym_row": {"task_data": {"seed": 7}}}'
    """
    if not isinstance(row, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # user data
        raise TaskError(f"a dataset row or a task must be a dict, got {shown(row)}")
    known = {name: row[name] for name in _COLUMNS if row.get(name) is not None}
    try:
        return json.dumps({_MARK: known if "task_data" in row else {"task_data": dict(row)}}, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise TaskError(f"a task must be JSON-serializable: {error}, in {shown(row)}") from error


def row_of(prompt: Any, name: str = "the prompt", remedy: str = _REMEDY) -> DatasetRow:
    """Parse a row from its prompt: the text from :func:`as_prompt`, or a list of messages that contains it."""
    texts: list[Any] = [prompt]
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        messages: list[Any] = [message for message in cast("Sequence[Any]", prompt) if isinstance(message, Mapping)]
        texts = [message.get("content") for message in messages]
    for text in texts:
        if not isinstance(text, str):
            continue
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict) and _MARK in found:
            return cast("DatasetRow", found[_MARK])
    raise ConfigError(
        f"{name} must contain a task of an agentsgym environment, got {shown(cast('object', prompt))}: {remedy}"
    )


def prompt_dataset(rows: Any, *, instruction: str | None = None) -> Any:
    """Make the dataset for a stock trainer, in which one text column contains each row.

    TRL passes only a row's prompt to a rollout function, so the prompt for ``rollout_func`` contains the row.

    Args:
        rows: Rows from :meth:`~agentsgym.envs.base.MultistepEnv.get_train_dataset` and :func:`agentsgym.mix`, or
            tasks: a dataset, a streaming dataset (``IterableDataset``), or a list of dicts.
        instruction: The user message for :func:`~agentsgym.interop.factory.as_environment_factory`, to which TRL
            appends the first observation; the row is then in the column ``task``. A task without a seed gets one that
            is derived from its row's index, so that the rollouts of a task group start the same episode.

    Returns:
        A ``Dataset``, or an ``IterableDataset`` for streaming rows, in the order of the rows.

    Raises:
        ConfigError: There are no rows.
        TaskError: A row is not a dict, or cannot be serialized as JSON.
    """
    library: Any = datasets  # its constructors are not fully typed
    if isinstance(rows, datasets.IterableDataset):
        return library.IterableDataset.from_generator(
            _prompt_rows, gen_kwargs={"rows": rows, "instruction": instruction}
        )
    prompt_rows = list(_prompt_rows(rows, instruction))
    if not prompt_rows:
        raise ConfigError("rows must contain at least one row, got none")
    return library.Dataset.from_list(prompt_rows)


def _prompt_rows(rows: Iterable[Mapping[str, Any]], instruction: str | None) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(rows):
        text = as_prompt(row)
        if instruction is None:
            yield {"prompt": text}
            continue
        known = row_of(text)
        task = seeded(known["task_data"], "row", index)
        yield {"prompt": [{"role": "user", "content": instruction}], "task": as_prompt({**known, "task_data": task})}


def seeded(task: Mapping[str, Any], *parts: object) -> dict[str, Any]:
    """Add a seed hashed from ``parts`` to a task without one."""
    return {**task, "seed": derive_seed(*parts) if task.get("seed") is None else task["seed"]}
