"""The page of ``GRPOEnvConfig``, made from its fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from trl import GRPOConfig

from agentsgym.training.config import GRPOEnvConfig
from agentsgym.training.settings.asynchronous import AsyncSettings
from agentsgym.training.settings.pools import PoolSettings
from agentsgym.training.settings.reporting import ReportSettings
from agentsgym.training.settings.storing import StoreSettings
from agentsgym.training.settings.vllm import VLLMSettings
from manual_pages.texts import attributes_of, code, one_line, page, table

WHERE = "reference/config.md"
#: What a setting is about, by the first of the group in the order of the class; the others follow it there.
_FIRST_OF_GROUP = {
    "advantage_estimator": "Credit",
    "layout": "Rows and loss",
    "invalid_turns": "Which rollouts count",
    "value_head": "Value head",
    "max_turn_tokens": "One turn",
    "max_failed_fraction": "Failures and limits of time",
    "stop_strings": "Sampling",
}
_OF_CLASS = {
    PoolSettings: "Where the environments run",
    VLLMSettings: "Several vLLM servers",
    AsyncSettings: "Rollouts ahead of training",
    StoreSettings: "Where rollouts are kept",
    ReportSettings: "What is logged",
}
_THEIRS = "Fields of TRL's with another default"


def own_fields() -> list[Field[Any]]:
    """The fields of ``GRPOEnvConfig`` that TRL's configuration has not, or has with another default."""
    theirs = {field.name: field.default for field in fields(GRPOConfig)}
    return [
        field
        for field in fields(GRPOEnvConfig)
        if theirs.get(field.name, MISSING) != field.default or field.name not in theirs
    ]


def settings_page() -> str:
    """The page: every field that is ours, in groups, with its type, default and range."""
    parts = [part for title, group in _groups().items() for part in (f"## {title}", _table(group))]
    return page(
        "# Every field of `GRPOEnvConfig`",
        "Made from the class itself. It has all fields of TRL's `GRPOConfig` as well; those are listed here where "
        "their default differs. What they do together is said in [Training](../training.md).",
        *parts,
    )


def _groups() -> dict[str, list[Field[Any]]]:
    theirs = {field.name for field in fields(GRPOConfig)}
    groups: dict[str, list[Field[Any]]] = {}
    title = ""
    for field in own_fields():
        owner = next((known for known in _OF_CLASS if field.name in known.__annotations__), None)
        if field.name in theirs:
            groups.setdefault(_THEIRS, []).append(field)
        elif owner:
            groups.setdefault(_OF_CLASS[owner], []).append(field)
        else:
            title = _FIRST_OF_GROUP.get(field.name, title)
            groups.setdefault(title, []).append(field)
    order = [*_FIRST_OF_GROUP.values(), *_OF_CLASS.values(), _THEIRS]
    return {title: groups[title] for title in order}


def _table(group: list[Field[Any]]) -> str:
    meanings = attributes_of(GRPOEnvConfig)
    return table(
        ["field", "type", "default", "must be", "meaning"],
        [
            [
                f"`{field.name}`",
                f"`{field.type}`",
                code(field.default),
                _range(field),
                meanings.get(field.name) or one_line(field.metadata["help"]),
            ]
            for field in group
        ],
    )


def _range(field: Field[Any]) -> str:
    if choices := field.metadata.get("env_choices"):
        return ", ".join(code(choice) for choice in choices)
    return str(field.metadata.get("env_expected") or "")


def names() -> Iterator[str]:
    """The name of every field that the page has."""
    yield from (field.name for field in own_fields())
