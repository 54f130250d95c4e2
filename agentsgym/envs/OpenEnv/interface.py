"""Request a server's interface: the schemas of actions and observations, and the tools of an MCP-style environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from agentsgym.envs.datasets.options import (
    COMMON_OPTIONS,
    CommonOptions,
    Part,
    checked_options,
    names_in_part,
    row_env,
    rows_of,
)
from agentsgym.envs.OpenEnv.conversion import NOT_SHOWN, Format, as_fields, fields_of, text_field
from agentsgym.envs.OpenEnv.server import OpenEnvServer
from agentsgym.envs.OpenEnv.wire import Connection, RejectedActionError, get_json
from agentsgym.envs.tool_schemas import schemas_of
from agentsgym.envs.Tools.results import as_text
from agentsgym.errors import ConfigError, EnvError
from agentsgym.fields import Field, is_dict, is_list, or_none
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from datasets import Dataset

_NUM_SEEDS = 256


ACT = "act"  # the only tool if the environment has none


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInterface:
    """The interface of a server, as plain values that can be sent to other processes.

    Attributes:
        action: JSON schema of an action; None if it was not requested.
        observation: JSON schema of a step's observation.
        reset_observation: JSON schema of a reset's observation.
        tools: Complete schemas of an MCP-style environment's tools; empty if there are none.
    """

    action: dict[str, Any] | None = None
    observation: dict[str, Any] | None = None
    reset_observation: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] = ()

    def format(self, given: str) -> Format:
        """Return the format of actions: ``env_config["format"]``, or the one that fits the schema."""
        if given != "auto":
            return cast("Format", given)
        if self.tools:
            return "tools"
        return "text" if text_field(self.action) is not None else "json"

    def tool_schemas(self) -> tuple[dict[str, Any], ...]:
        """Return the agent's tool schemas: the environment's, or a single tool whose arguments are the action."""
        if self.tools:
            return self.tools
        action = self.action or {}
        function = {
            "name": ACT,
            "description": str(action.get("description") or "Act in the game."),
            "parameters": {  # without the fields common to all actions
                "type": "object",
                "properties": fields_of(action),
                "required": [name for name in action.get("required") or () if name not in NOT_SHOWN],
                **{key: value for key, value in action.items() if key in {"$defs", "additionalProperties"}},
            },
        }
        return ({"type": "function", "function": function},)

    def description(self, given: str) -> str | None:
        """Return instructions for the agent; None if none are needed."""
        chosen = self.format(given)
        fields = fields_of(self.action)
        if chosen == "json" and fields:
            lines = ["Answer each time with one JSON object with these fields:"]
            for name, field in fields.items():
                optional = "" if name in ((self.action or {}).get("required") or ()) else "may be left out"
                lines.append(f"- {name}: {', '.join(filter(None, (_about(field), optional)))}".rstrip(": "))
            return "\n".join(lines)
        name = text_field(self.action) if chosen == "text" else None
        about = _about(fields[name]) if name is not None else ""
        return f"Answer each time with one value alone: {about}" if about else None


def request_interface(server: OpenEnvServer, url: str) -> ServerInterface:
    """Request a server's schemas and, if its actions are tool calls, its tools.

    Raises:
        EnvError: The server does not respond, or its response is invalid.
        ConfigError: The schema of a tool is invalid.
    """
    schemas = get_json(server, url, "schema", limit_s=server.connect_timeout_s)
    for name in ("action", "observation"):
        if not isinstance(schemas.get(name), dict):
            raise EnvError(
                f"{server.label} must return the schema of its {name}s at /schema, got {shown(schemas, 100)}: "
                "is it an OpenEnv server?"
            )
    reset: Any = schemas.get("reset_observation")
    # schemas_of resolves references.
    (act,) = schemas_of([{"name": ACT, "parameters": schemas["action"]}], server.label)
    action: dict[str, Any] = {**schemas["action"], **act["function"]["parameters"]}
    # Actions may be tool calls if they have the fields of a call, or none.
    fields = fields_of(action)
    is_bare = not fields and not {"anyOf", "oneOf", "allOf"} & action.keys()
    may_be_call = is_bare or {"tool_name", "arguments"} <= fields.keys()
    return ServerInterface(
        action=action,
        observation=schemas["observation"],
        reset_observation=cast("Any", reset) if isinstance(reset, dict) else schemas["observation"],
        tools=_request_tools(server, url, is_required=not is_bare) if may_be_call else (),
    )


def _request_tools(server: OpenEnvServer, url: str, *, is_required: bool) -> tuple[dict[str, Any], ...]:
    connection = Connection(server, url)
    try:
        answer = connection.step({"type": "list_tools"})
    except RejectedActionError as error:
        if is_required:
            raise EnvError(f"{server.label} could not list its tools: {sentence_of(error)}") from error
        return ()  # an environment whose actions have no fields
    finally:
        connection.close()
    listed: Any = answer["observation"].get("tools")
    functions: list[dict[str, Any]] = []
    for tool in cast("list[Any]", listed) if isinstance(listed, list) else []:
        fields = as_fields(tool)
        if not isinstance(fields.get("name"), str):
            raise EnvError(f"{server.label} lists a tool without a name: {shown(tool)}")
        description: Any = fields.get("description") or ""
        parameters: Any = fields.get("input_schema") or {}
        function: dict[str, Any] = {"name": fields["name"], "description": description, "parameters": parameters}
        functions.append({"type": "function", "function": function})
    if not functions:
        reply: object = answer["observation"].get("metadata") or answer
        raise EnvError(f"{server.label} accepts tool calls but lists no tools: {shown(reply, 200)}")
    return schemas_of(functions, server.label)


def result_of(observation: Mapping[str, Any]) -> tuple[str, bool]:
    """Extract the result of a tool call: the text for the agent, and whether the call failed."""
    error: Any = observation.get("error")
    if isinstance(error, dict):
        fields = as_fields(error)
        if fields.get("error_type") == "transport_error":
            raise EnvError(f"the server could not reach its tool: {fields.get('message')}")
        return f"Error: {fields.get('message')}", True
    result: Any = observation.get("result")
    fields = as_fields(result)
    parts: Any = fields.get("content")
    if not isinstance(parts, list):
        return as_text(result), False
    texts: list[str] = []
    for part in map(as_fields, cast("list[Any]", parts)):
        text = part.get("text")
        texts.append(text if isinstance(text, str) else f"[{part.get('type')}]")
    content = "\n".join(texts)
    is_error = bool(fields.get("is_error") or fields.get("isError"))
    return (f"Error: {content}" if is_error else content), is_error


def _about(field: Mapping[str, Any]) -> str:
    """Describe a field for the agent: its description, choices, and type (unless it is a string)."""
    choices: Any = field.get("enum")
    kind = field.get("type")
    about = [
        str(field["description"]) if field.get("description") else "",
        f"one of {', '.join(map(str, cast('list[Any]', choices)))}" if isinstance(choices, list) else "",
        f"({kind})" if isinstance(kind, str) and kind != "string" else "",
    ]
    return " ".join(filter(None, about))


class DatasetOptions(CommonOptions, total=False):
    """Options of the dataset, in addition to the common ones.

    Attributes:
        tasks: Reset arguments, one dict per task, such as ``[{"index": 0}, {"index": 1}]``; None for only seeds, of
            which there are 256 by default.
    """

    tasks: Sequence[Mapping[str, Any]] | None


_OPTIONS: Mapping[str, Field] = {
    **COMMON_OPTIONS,
    "tasks": Field(
        default=None,
        expected="a list of at least one dict, or None",
        valid=or_none(lambda value: is_list(value) and len(value) > 0 and all(map(is_dict, value))),
    ),
}


def task_dataset(
    env_class: type[Any], env_config: Mapping[str, Any] | None, part: Part, options: Mapping[str, Any]
) -> Dataset:
    """Make the rows of a split, with ``env_config`` unchanged; the server is not contacted."""
    row_env(env_class, env_config, "action", "observation")  # raises if rows cannot store the configuration
    settings = checked_options(options, _OPTIONS)
    if settings["tasks"] is None:
        settings = {**settings, "size": _NUM_SEEDS if settings["size"] is None else settings["size"]}
        return rows_of([{}], env_class, env_config, part, settings)
    try:
        tasks = {json.dumps(task, sort_keys=True): task for task in settings["tasks"]}
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the tasks of dataset rows must be plain JSON: {error}") from error
    names = names_in_part([*tasks], part, settings, "tasks")
    return rows_of([tasks[name] for name in names], env_class, env_config, part, settings)
