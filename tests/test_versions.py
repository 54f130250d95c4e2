"""What differs between versions of transformers, on stand-ins for the versions that are not installed."""

from __future__ import annotations

import inspect
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedConfig, utils

from agentsgym.agents.policy.decoding import Forward
from agentsgym.versions import CACHE_NAMES, json_schema, recompute_by_default

NEW, OLD = "activation_checkpointing", "gradient_checkpointing"


@pytest.mark.parametrize("settings", [{OLD: None}, {NEW: None, OLD: None}], ids=["before 5.23", "from 5.23 on"])
@pytest.mark.parametrize("is_recomputed", [True, False])
def test_recomputation_is_set_under_the_name_of_the_version(
    settings: dict[str, bool | None], *, is_recomputed: bool
) -> None:
    args = SimpleNamespace(**settings)
    recompute_by_default(args, is_recomputed=is_recomputed)
    assert vars(args) == {**settings, next(iter(settings)): is_recomputed}


@pytest.mark.parametrize("settings", [{OLD: False}, {NEW: None, OLD: False}, {NEW: False, OLD: None}])
def test_a_users_choice_is_kept_under_either_name(settings: dict[str, bool | None]) -> None:
    args = SimpleNamespace(**settings)
    recompute_by_default(args, is_recomputed=True)
    assert vars(args) == settings


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_is_passed_under_the_name_that_the_model_gives_it(name: str) -> None:
    def forward(self: Any, **arguments: Any) -> dict[str, Any]:
        return arguments

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(one, kind) for one in ("self", "input_ids", name)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    model: Any = type(
        "Model", (), {"forward": forward, "__call__": forward, "device": "cpu", "config": PreTrainedConfig()}
    )()
    run = Forward(model)
    assert run.cache_name == name
    assert run([[1]], **{run.cache_name: "cache"})[name] == "cache"


class Color(Enum):
    RED = "red"


def paint(color: Color) -> str:
    """Paint.

    Args:
        color: The color.
    """
    return str(color)


def test_an_enum_is_an_enum_or_refused_never_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"type": "object", "description": "The color."}
    after = {"type": "string", "enum": ["red"], "description": "The color."}
    for found in (before, after):
        schema = {"function": {"parameters": {"properties": {"color": found}}}}
        monkeypatch.setattr(utils, "get_json_schema", lambda _, schema=schema: schema)
        if found is after:
            assert json_schema(paint) == schema
        else:
            with pytest.raises(TypeError, match="Color'> has no JSON form"):
                json_schema(paint)
