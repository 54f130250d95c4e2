"""Answer what the page asks of a store; the same answers are served and written into a page."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from agentsgym.envs.datasets.naming import name_of_env
from agentsgym.errors import ConfigError
from agentsgym.fields import is_int, require
from agentsgym.store.values import from_json
from agentsgym.viewer.blocks import Blocks
from agentsgym.viewer.groups import group_of, label_of
from agentsgym.viewer.index import Index
from agentsgym.viewer.plain import entries
from agentsgym.viewer.rollouts import rollout_of
from agentsgym.viewer.token_texts import TokenTexts
from agentsgym.viewer.turns import turns_of
from agentsgym.viewer.what_if import (
    KeptBatches,
    Request,
    WhatIf,
    choices,
    request_of,
    settings_as_dict,
    settings_of,
    turn_credit_of,
)

if TYPE_CHECKING:
    from agentsgym.store.reader import RolloutStore

Mode = Literal["served", "written"]

_SEARCH_S: Final = 10.0  # a search that takes longer says that it is not complete
_PER_SEARCH: Final = 1024


class Answers:
    """What the page may ask; any thread may ask.

    Attributes:
        index: The listed rollouts.
        store: The rollouts of the store, as many as there are.
    """

    def __init__(self, store: RolloutStore, *, limit: int, mode: Mode, tokenizer: Path | None = None) -> None:
        """Read the list.

        Args:
            store: The rollouts: a store, or a part of one.
            limit: List the newest of so many.
            mode: Whether the page will ask, or hold everything.
            tokenizer: A ``tokenizer.json``, or its folder, for all rollouts; None for those that the store keeps.

        Raises:
            ConfigError: ``limit`` is not positive.
            StoreError: A file is gone, or there is no tokenizer at that place.
        """
        require("limit", limit, is_int(1), "a positive int")
        self.store = store
        self._mode: Mode = mode
        self._texts = TokenTexts(store.path, tokenizer)
        self.index = Index(store, limit)
        self._blocks = Blocks(store)
        self._batches = KeptBatches()

    @property
    def title(self) -> str:
        """What the store is called."""
        return self.store.path.resolve().name or str(self.store.path)

    def list(self) -> dict[str, Any]:
        """The rollouts, one value a column each, and what can be chosen for :meth:`what_if`."""
        return {
            "title": self.title,
            "path": str(self.store.path) if self._mode == "served" else None,  # a written page is sent around
            "total": self.index.total,
            "shown": len(self.index.rows),
            "mode": self._mode,
            "note": self.note,
            "columns": self.index.columns,
            "words": self.index.words,
            "what_if": choices(),
        }

    @property
    def note(self) -> str | None:
        """What of the store is not in the list; None if all is."""
        notes: list[str] = []
        shown = len(self.index.rows)
        if shown < self.index.total:
            notes.append(f"the newest {shown:,} of {self.index.total:,} rollouts; --limit shows more")
        if (everything := len(self.store.whole)) > self.index.total:
            notes.append(f"selected from the {everything:,} rollouts of the store")
        if skipped := len(self.store.skipped):
            notes.append(f"{skipped} files of the store cannot be read and are skipped")
        return "; ".join(notes) or None

    def rollout(self, row: int) -> dict[str, Any]:
        """One rollout: conversation, turns, tokens.

        Raises:
            ConfigError: The list has no such rollout.
            StoreError: Its file is gone, or damaged.
        """
        if row not in self.index:
            raise ConfigError(f"the list has no rollout in row {row}")
        return rollout_of(row, self._blocks.record(row), self._texts.texts)

    def group(self, key: int) -> dict[str, Any]:
        """The rollouts of one task group, side by side.

        Raises:
            ConfigError: The list has no such group.
            StoreError: A file is gone, or damaged.
        """
        rows = self._rows_of(key)
        records = self._blocks.records(rows)
        first = records[0]
        label = label_of(first, name_of_env(first.env_class_path, first.env_config or {}))
        settings = settings_of(first)
        told = None if settings is None else settings_as_dict(settings, turn_credit_of(first))
        return group_of(key, label, rows, records) | {"settings": told}

    def turns(self) -> dict[str, Any]:
        """Reward, advantage, surprisal and entropy of every turn of every rollout.

        Raises:
            StoreError: A file is gone, or damaged.
        """
        return turns_of(self.store[max(0, self.index.total - len(self.index.rows)) :])

    def search(self, text: str) -> dict[str, Any]:
        """Find the rollouts in whose messages a text stands, in any case.

        Raises:
            StoreError: A file is gone, or damaged.
        """
        wanted = text.lower()
        raw = json.dumps(text, ensure_ascii=False)[1:-1].lower()  # as it stands in the column
        rows: list[int] = []
        deadline = time.monotonic() + _SEARCH_S
        end = self.index.total
        begin = end - len(self.index.rows)
        while end > begin and wanted:
            if time.monotonic() > deadline:
                return {"rows": rows, "complete": False}
            part = self.store[max(begin, end - _PER_SEARCH) : end]
            found = part.table(["messages"]).column("messages").to_pylist()
            rows += [row for row, one in zip(part.rows, found, strict=True) if _says(one, raw, wanted)]
            end -= len(part)
        return {"rows": sorted(rows), "complete": True}

    def what_if(self, key: int, parameters: Mapping[str, str]) -> dict[str, Any]:
        """What another estimator, discount, scale or turn credit gives the rollouts of a task group.

        Args:
            key: The group.
            parameters: As :func:`~agentsgym.viewer.what_if.request_of` reads them.

        Raises:
            ConfigError: The list has no such group, a parameter is not valid, or the estimator cannot be used on
                these rollouts.
            StoreError: A file is gone, or damaged.
        """
        return self.what_if_of(key, request_of(parameters, self.batch(key).settings))

    def what_if_of(self, key: int, request: Request) -> dict[str, Any]:
        """As :meth:`what_if`, by settings that are read already."""
        rows, batch = self._rows_of(key), self.batch(key)
        places = {row: index for index, row in enumerate(self.index.batch(key).rows)}
        given = batch.advantages(request)
        own = [given[places[row]] for row in rows]
        return {
            "settings": request.as_dict(turn_credit_of(batch.records[places[rows[0]]])),
            "rows": rows,
            "advantages": [entries(turns) for turns in own],
            "compared": len(batch.records),
            "note": batch.note,
        }

    def batch(self, key: int) -> WhatIf:
        """The rollouts that a group's advantages are computed with.

        Raises:
            ConfigError: The list has no such group.
            StoreError: A file is gone, or damaged.
        """
        self._rows_of(key)
        found = self.index.batch(key)

        def make() -> WhatIf:
            return WhatIf(self._blocks.records(found.rows), found.groups, is_training=found.is_training)

        return self._batches.get((*found.rows,), make)

    def _rows_of(self, key: int) -> list[int]:
        if key not in self.index.groups:
            raise ConfigError(f"the list has no task group {key}")
        return self.index.groups[key]


def _says(messages: str | None, raw: str, wanted: str) -> bool:
    """Whether a text stands in the content of some message; looked at closely only where it may."""
    if messages is None:
        return False
    lowered = messages.lower()
    if raw not in lowered and '"$str"' not in lowered:
        return False
    return any(wanted in text.lower() for text in _texts_of(from_json(messages)))


def _texts_of(value: Any) -> list[str]:
    """Everything that is said in a conversation: all texts in it but the roles."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return [text for name, one in items if name not in {"role", "type", "id"} for text in _texts_of(one)]
    if not isinstance(value, list | tuple):
        return []
    return [text for one in cast("Sequence[Any]", value) for text in _texts_of(one)]
