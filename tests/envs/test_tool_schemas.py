"""The JSON schemas of tools: made of functions, completed, and refused with what is missing."""

import enum
from typing import Any, Literal

import pytest
from transformers import cache_utils

from agentsgym.envs.calls.schemas import schemas_of
from agentsgym.errors import ConfigError


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
