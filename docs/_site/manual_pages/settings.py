"""Generation of the page about ``GRPOEnvConfig`` from its fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

from trl import GRPOConfig

from agentsgym.training.config import GRPOEnvConfig
from manual_pages.texts import attributes_of, code, one_line, page, table

PATH = "reference/config.md"
#: The title of each group of settings, by its first field; the group's other fields follow it in the class.
_FIRST_OF_GROUP = {
    "advantage_estimator": "Credit",
    "layout": "Rows and loss",
    "invalid_turns": "Which rollouts count",
    "value_head": "Value head",
    "max_turn_tokens": "Sampling",
    "max_staleness": "Rollouts ahead of training",
    "max_failed_fraction": "Failures and time limits",
    "env_pool": "Where environments run",
    "store_rollouts": "Where rollouts are stored",
    "log_metrics": "What is logged",
}
_THEIRS = "Fields of TRL with a different default or allowed values"


def own_fields() -> list[Field[Any]]:
    """Return the fields of ``GRPOEnvConfig`` that ``GRPOConfig`` lacks, or has with another default or check."""
    theirs = {field.name: field.default for field in fields(GRPOConfig)}
    return [
        field
        for field in fields(GRPOEnvConfig)
        if theirs.get(field.name, MISSING) != field.default or field.name not in theirs or "check" in field.metadata
    ]


def settings_page() -> str:
    """Return the page with every field of :func:`own_fields` in groups, with its type, default and range."""
    parts = [part for title, group in _groups().items() for part in (f"## {title}", _table(group))]
    return page(
        "# Every field of `GRPOEnvConfig`",
        "This page is generated from the class. The class also has all fields of TRL's `GRPOConfig`, of which this "
        "page lists those whose defaults or allowed values differ. [Training](../training.md) explains how they work "
        "together.",
        *parts,
    )


def _groups() -> dict[str, list[Field[Any]]]:
    theirs = {field.name for field in fields(GRPOConfig)}
    groups: dict[str, list[Field[Any]]] = {}
    title = ""
    for field in own_fields():
        if field.name in theirs:
            groups.setdefault(_THEIRS, []).append(field)
        else:
            title = _FIRST_OF_GROUP.get(field.name, title)
            groups.setdefault(title, []).append(field)
    return {title: groups[title] for title in (*_FIRST_OF_GROUP.values(), _THEIRS)}


def _table(group: list[Field[Any]]) -> str:
    meanings = attributes_of(GRPOEnvConfig)
    return table(
        ["field", "type", "default", "must be", "meaning"],
        [
            [
                f"`{field.name}`",
                f"`{field.type}`",
                code(field.default),
                field.metadata["check"].expected if "check" in field.metadata else "",
                meanings.get(field.name) or one_line(field.metadata["help"]),
            ]
            for field in group
        ],
    )


def names() -> Iterator[str]:
    """Yield the name of every field on the page."""
    yield from (field.name for field in own_fields())
