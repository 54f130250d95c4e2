"""The interface of a server: the schemas of its actions and observations, and the tools of an MCP-style environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from agentsgym.envs.calls.schemas import schemas_of
from agentsgym.envs.OpenEnv.conversion import NOT_SHOWN, fields_of, text_field
from agentsgym.envs.OpenEnv.http import get_json
from agentsgym.envs.OpenEnv.server import OpenEnvServer
from agentsgym.envs.OpenEnv.wire import Connection, RefusedActionError
from agentsgym.envs.Tools.results import as_text
from agentsgym.errors import EnvError
from agentsgym.texts import sentence_of, shown

Format = Literal["text", "json", "tools"]
ACT = "act"  # the one tool of a game whose actions have several fields

_LIST_TOOLS = {"type": "list_tools"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInterface:
    """The interface of a server, as plain values that can be sent to another process.

    Attributes:
        action: JSON schema of an action; None if it was not requested.
        observation: JSON schema of the observation of a step.
        reset_observation: JSON schema of the observation of a reset.
        tools: Full schemas of an MCP-style environment's tools; empty if there are none.
    """

    action: dict[str, Any] | None = None
    observation: dict[str, Any] | None = None
    reset_observation: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] = ()

    def format(self, given: str) -> Format:
        """Return the format of actions: ``env_config["format"]``, or the one that suits the schema."""
        if given != "auto":
            return cast("Format", given)
        if self.tools:
            return "tools"
        return "text" if text_field(self.action) is not None else "json"

    def tool_schemas(self) -> tuple[dict[str, Any], ...]:
        """The schemas of the agent's tools: those of the environment, or a single tool that takes an action."""
        if self.tools:
            return self.tools
        action = self.action or {}
        function = {
            "name": ACT,
            "description": str(action.get("description") or "Act in the game."),
            "parameters": own_parameters(action),
        }
        return ({"type": "function", "function": function},)

    def description(self, given: str) -> str | None:
        """Return instructions for the agent; None if none are needed."""
        chosen = self.format(given)
        fields = fields_of(self.action)
        if chosen == "json" and fields:
            lines = [_line(name, one, self.action) for name, one in fields.items()]
            return "\n".join(["Answer each time with one JSON object with these fields:", *lines])
        name = text_field(self.action) if chosen == "text" else None
        said = _about(fields[name]) if name is not None else ""
        return f"Answer each time with one value alone: {said}" if said else None


def own_parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an action's schema without the fields common to all actions."""
    required = [name for name in schema.get("required") or () if name not in NOT_SHOWN]
    kept = {key: value for key, value in schema.items() if key in {"$defs", "additionalProperties"}}
    return {"type": "object", "properties": fields_of(schema), "required": required, **kept}


def request_interface(server: OpenEnvServer, url: str) -> ServerInterface:
    """Request a server's schemas and, if its actions are tool calls, its tools.

    Raises:
        EnvError: The server does not answer, or its answer is invalid.
        ConfigError: The schema of a tool is invalid.
    """
    schemas = get_json(server, url, "schema", limit_s=server.connect_timeout_s)
    for name in ("action", "observation"):
        if not isinstance(schemas.get(name), dict):
            raise EnvError(
                f"{server.label} must return a schema of its {name}s at /schema, got {shown(schemas, 100)}: "
                "is it an OpenEnv server?"
            )
    reset: Any = schemas.get("reset_observation")
    action = {**schemas["action"], **_written_out(server, schemas["action"])}
    return ServerInterface(
        action=action,
        observation=schemas["observation"],
        reset_observation=cast("Any", reset) if isinstance(reset, dict) else schemas["observation"],
        tools=_ask_tools(server, url, action) if _may_have_tools(action) else (),
    )


def _written_out(server: OpenEnvServer, action: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve the references in an action's schema."""
    (schema,) = schemas_of([{"name": ACT, "parameters": action}], server.label)
    return schema["function"]["parameters"]


def _may_have_tools(action: Mapping[str, Any]) -> bool:
    """Return whether an action may be a tool call: it has a call's fields, or none at all."""
    fields = fields_of(action)
    is_bare = not fields and not {"anyOf", "oneOf", "allOf"} & action.keys()
    return is_bare or {"tool_name", "arguments"} <= fields.keys()


def _ask_tools(server: OpenEnvServer, url: str, action: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    connection = Connection(server, url)
    try:
        answer = connection.step(_LIST_TOOLS)
    except RefusedActionError as error:
        if fields_of(action):
            raise EnvError(f"{server.label} could not list its tools: {sentence_of(error)}") from error
        return ()  # a game whose actions say nothing
    finally:
        connection.close()
    listed: Any = answer["observation"].get("tools")
    tools = cast("list[Any]", listed) if isinstance(listed, list) else []
    if not tools:
        reply: object = answer["observation"].get("metadata") or answer
        raise EnvError(f"{server.label} accepts tool calls but lists no tools: {shown(reply, 200)}")
    return schemas_of([_schema(server, tool) for tool in tools], server.label)


def _schema(server: OpenEnvServer, tool: Any) -> dict[str, Any]:
    fields = cast("dict[str, Any]", tool) if isinstance(tool, dict) else {}
    if not isinstance(fields.get("name"), str):
        raise EnvError(f"{server.label} lists a tool without a name: {shown(cast('object', tool))}")
    function = {"name": fields["name"], "description": fields.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": fields.get("input_schema") or {}}}


def result_of(observation: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the result of a tool call: the text for the agent, and whether the call failed.

    Raises:
        EnvError: The server could not reach the tool.
    """
    error: Any = observation.get("error")
    if isinstance(error, dict):
        fields = cast("dict[str, Any]", error)
        if fields.get("error_type") == "transport_error":
            raise EnvError(f"the server could not reach its tool: {fields.get('message')}")
        return f"Error: {fields.get('message')}", True
    result: Any = observation.get("result")
    fields = cast("dict[str, Any]", result) if isinstance(result, dict) else {}
    parts: Any = fields.get("content")
    if not isinstance(parts, list):
        return as_text(result), False
    content = "\n".join(map(_text_of_part, cast("list[Any]", parts)))
    is_error = bool(fields.get("is_error") or fields.get("isError"))
    return (f"Error: {content}" if is_error else content), is_error


def _text_of_part(part: Any) -> str:
    fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
    text = fields.get("text")
    return text if isinstance(text, str) else f"[{fields.get('type')}]"


def _line(name: str, field: Mapping[str, Any], schema: Mapping[str, Any] | None) -> str:
    about = [_about(field)]
    if name not in ((schema or {}).get("required") or ()):
        about.append("may be left out")
    return f"- {name}: {', '.join(filter(None, about))}".rstrip(": ")


def _about(field: Mapping[str, Any]) -> str:
    """Describe a field: its type unless it is a text, its choices, and its description."""
    choices: Any = field.get("enum")
    kind = field.get("type")
    said = [
        str(field["description"]) if field.get("description") else "",
        f"one of {', '.join(map(str, cast('list[Any]', choices)))}" if isinstance(choices, list) else "",
        f"({kind})" if isinstance(kind, str) and kind != "string" else "",
    ]
    return " ".join(filter(None, said))
