"""The JSON schemas of tools, and what is wrong with a call, answered to the agent."""

import enum
from typing import Any, Literal

import pytest
from transformers import cache_utils

from agentsgym import ConfigError, ToolCall
from agentsgym.envs.tool_schemas import schemas_of
from agentsgym.tokens.calls.schemas import check_call

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
        ({"k": 3.5}, "the argument 'k' of 'search' must be an integer, got 3.5"),
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


class Unit(enum.Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


def forecast(city: str, days: int = 1, unit: Unit = Unit.CELSIUS, detail: Literal["low", "high"] | None = None) -> str:
    """Say how the weather will be.

    Args:
        city: Where.
        days: How many days ahead.
        unit: The unit
            of degrees.
        detail: How much of it.
    """
    return f"{city} {days} {unit} {detail}"


@pytest.mark.skipif(not hasattr(cache_utils, "DummyLayer"), reason="transformers before 5.23 refuses enums")
def test_a_function_becomes_a_schema_without_what_it_returns() -> None:
    (schema,) = schemas_of([forecast], "Env")
    assert schema == {
        "type": "function",
        "function": {
            "name": "forecast",
            "description": "Say how the weather will be.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where."},
                    "days": {"type": "integer", "description": "How many days ahead."},
                    "unit": {"type": "string", "enum": ["c", "f"], "description": "The unit of degrees."},
                    "detail": {
                        "type": "string",
                        "enum": ["low", "high"],
                        "nullable": True,
                        "description": "How much of it.",
                    },
                },
                "required": ["city"],
            },
        },
    }


def test_a_method_is_a_tool_without_its_self() -> None:
    class Box:
        def put(self, thing: str) -> None:
            """Put something in.

            Args:
                thing: What.
            """

    (schema,) = schemas_of([Box().put], "Env")
    assert schema["function"]["parameters"]["properties"] == {"thing": {"type": "string", "description": "What."}}


def untyped(a: int, b) -> int:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Add.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def undescribed(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
    """
    return a + b


def without_docstring(a: int) -> int:
    return a


def of_any_number(*numbers: int) -> int:
    """Add.

    Args:
        numbers: Any.
    """
    return sum(numbers)


def of_an_object(env: pytest.Config) -> str:
    """Look.

    Args:
        env: What.
    """
    return str(env)


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (untyped, "Env's tool 'untyped': its argument 'b' has no type hint: write for example 'b: str'"),
        (undescribed, "'undescribed': its docstring does not describe 'b': write under 'Args:' a line 'b: what it is'"),
        (without_docstring, "'without_docstring': it has no docstring: write what it does"),
        (of_any_number, "its argument 'numbers' takes any number of values: calls pass arguments by name"),
        (of_an_object, "the type of its argument 'env' has no JSON form, .*Config.*: use str, int"),
        (7, "a tool of Env must be a typed function or a JSON schema, got 7"),
        ({"description": "?"}, "must have a name of letters"),
        ({"name": "two words"}, "must have a name of letters, digits, .* got 'two words'"),
        ({"type": "retrieval", "function": {"name": "f"}}, 'must be {"type": "function"'),
        ({"name": "f", "description": 3}, "its description must be a string, got 3"),
        ({"name": "f", "parameters": {"type": "string"}}, 'must be a JSON schema of the type "object"'),
        ({"name": "f", "parameters": {"properties": {"a": "integer"}}}, "properties must be a dict of JSON schemas"),
        ({"name": "f", "parameters": {"required": ["a"]}}, r"required must be a list of its properties, got \['a'\]"),
        ({"name": "f", "parameters": {"properties": {"a": {"$ref": "#/$defs/A"}}}}, r"its \$ref .* is not among"),
        ({"name": "f", "default": float("nan")}, "must contain only JSON values"),
        ({"name": "f", "default": object()}, "must contain only JSON values"),
    ],
)
def test_a_tool_without_a_schema_is_refused_with_what_is_missing(tool: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schemas_of([tool], "Env")


@pytest.mark.parametrize("tools", ["forecast", {"name": "f"}, 3, forecast])
def test_tools_that_are_no_list_are_refused(tools: Any) -> None:
    with pytest.raises(ConfigError, match="the tools of Env must be a list"):
        schemas_of(tools, "Env")


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools of Env are called 'forecast'"):
        schemas_of([{"name": "forecast"}, {"name": "forecast"}], "Env")


def test_a_bare_schema_is_completed_and_left_as_it_was() -> None:
    given = {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}, "strict": True}
    (schema,) = schemas_of([given], "Env")
    parameters = {"type": "object", "properties": {"at": {"type": "string", "description": ""}}}
    function = {"name": "look", "description": "", "parameters": parameters, "strict": True}
    assert schema == {"type": "function", "function": function}
    assert given["parameters"] == {"properties": {"at": {"type": "string"}}}
    assert schemas_of([schema], "Env") == (schema,)


def test_references_are_written_out_and_null_becomes_nullable() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}, "next": {"$ref": "#/$defs/Point"}}}
    properties = {
        "to": {"$ref": "#/$defs/Point", "description": "Where."},
        "why": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Why"},
        "how": {"type": ["integer", "null"]},
        "any": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/Point"}, {"type": "null"}]},
    }
    (schema,) = schemas_of([{"name": "go", "parameters": {"properties": properties, "$defs": {"Point": point}}}], "Env")
    inlined = {"type": "object", "properties": {"x": {"type": "integer"}, "next": {"type": "object"}}}
    assert schema["function"]["parameters"]["properties"] == {
        "to": {**inlined, "description": "Where."},
        "why": {"type": "string", "nullable": True, "default": None, "title": "Why", "description": ""},
        "how": {"type": "integer", "nullable": True, "description": ""},
        "any": {"anyOf": [{"type": "integer"}, inlined], "nullable": True, "description": ""},
    }
