"""What is wrong with a call, answered to the agent."""

from typing import Any

import pytest

from agentsgym.envs.calls.schemas import check_call, schemas_of
from agentsgym.types import ToolCall

PROPERTIES = {
    "query": {"type": "string", "minLength": 1},
    "k": {"type": "integer", "minimum": 1, "maximum": 9},
    "share": {"type": "number", "exclusiveMinimum": 0},
    "order": {"type": "string", "enum": ["up", "down"]},
    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    "where": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "note": {"type": "string", "nullable": True},
    "id": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "deep": {"type": ["boolean", "integer"]},
    "place": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
    "open": {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}},
    "shut": {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
    "rest": {"type": "object", "additionalProperties": {"type": "integer"}},
}
SCHEMAS = schemas_of(
    [{"name": "search", "parameters": {"properties": PROPERTIES, "required": ["query"]}}, {"name": "stop"}], "Env"
)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"k": 9, "share": 0.5, "order": "up", "tags": ["a", "b"], "where": {"x": -1, "y": 2}, "note": None},
        {"share": 3, "id": 3, "deep": True, "rest": {"a": 1}},
        {"id": "3", "deep": 3, "note": "", "tags": []},
        {"place": [1, "a"], "open": [1, "a", "b"], "shut": [1]},
        {"open": [], "shut": []},
    ],
)
def test_a_call_that_fits_is_not_criticized(arguments: dict[str, Any]) -> None:
    assert check_call(ToolCall(name="search", arguments={"query": "?", **arguments}), SCHEMAS) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": 3}, "the argument 'query' of 'search' must be a string, got 3"),
        ({"query": ""}, "the argument 'query' of 'search' must be a string of at least 1 characters, got ''"),
        ({"k": "3"}, "the argument 'k' of 'search' must be an integer, got '3'"),
        ({"k": True}, "the argument 'k' of 'search' must be an integer, got True"),
        ({"k": 3.0}, "the argument 'k' of 'search' must be an integer, got 3.0"),
        ({"k": 10}, "the argument 'k' of 'search' must be at most 9, got 10"),
        ({"k": None}, "the argument 'k' of 'search' must be an integer, got None"),
        ({"share": 0}, "the argument 'share' of 'search' must be above 0, got 0"),
        ({"share": float("nan")}, "the argument 'share' of 'search' must be a number, got nan"),
        ({"order": "sideways"}, "the argument 'order' of 'search' must be one of 'up', 'down', got 'sideways'"),
        ({"tags": "a"}, "the argument 'tags' of 'search' must be a list, got 'a'"),
        ({"tags": ["a", 1]}, "the argument 'tags[1]' of 'search' must be a string, got 1"),
        ({"tags": ["a", "b", "c"]}, "must be a list of at most 2 items"),
        ({"place": [1]}, "the argument 'place' of 'search' must be a list of 2 items, got [1]"),
        ({"place": [1, "a", 2]}, "the argument 'place' of 'search' must be a list of 2 items, got [1, 'a', 2]"),
        ({"place": ["a", 1]}, "the argument 'place[0]' of 'search' must be an integer, got 'a'"),
        ({"open": [1, "a", 2]}, "the argument 'open[2]' of 'search' must be a string, got 2"),
        ({"shut": [1, 2]}, "the argument 'shut' of 'search' must be a list of at most 1 items, got [1, 2]"),
        ({"where": {}}, "the argument 'where.x' of 'search' is missing"),
        ({"where": {"x": "0"}}, "the argument 'where.x' of 'search' must be an integer, got '0'"),
        ({"id": 0.5}, "the argument 'id' of 'search' must be one of the 2 forms"),
        ({"deep": "no"}, "the argument 'deep' of 'search' must be true or false or an integer, got 'no'"),
        ({"rest": {"a": "b"}}, "the argument 'rest.a' of 'search' must be an integer, got 'b'"),
        ({"ordr": "up"}, "'search' has no argument 'ordr'; did you mean 'order'?"),
    ],
)
def test_a_call_that_does_not_fit_names_the_place(arguments: dict[str, Any], message: str) -> None:
    output = check_call(ToolCall(name="search", arguments={"query": "?", **arguments}), SCHEMAS)
    assert output is not None
    assert message in output


def test_what_is_missing_unknown_or_malformed_is_reported() -> None:
    assert check_call(ToolCall(name="search"), SCHEMAS) == "the argument 'query' of 'search' is missing"
    assert check_call(ToolCall(name="serch"), SCHEMAS) == "there is no tool 'serch'; did you mean 'search'?"
    assert check_call(ToolCall(name="x"), SCHEMAS) == "there is no tool 'x'; valid names: 'search', 'stop'"
    assert check_call(ToolCall(name="stop", arguments={"a": 1}), SCHEMAS) == "'stop' has no argument 'a'; it takes none"
    assert check_call(ToolCall(name="search", error="it is no JSON"), SCHEMAS) == "it is no JSON"


def test_arguments_nested_beyond_the_recursion_limit_are_an_error_of_the_call() -> None:
    value: dict[str, Any] = {}
    for _ in range(5000):
        value = {"x": value}
    chain: dict[str, Any] = {"type": "object"}
    chain["properties"] = {"x": chain}
    schema = {"type": "function", "function": {"name": "f", "parameters": chain}}
    assert check_call(ToolCall(name="f", arguments=value), [schema]) == "the arguments of 'f' are nested too deeply"
