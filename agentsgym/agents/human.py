"""An agent for a person at a terminal, who reads the observations and types answers and tool calls."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agentsgym.agents.base import Agent
from agentsgym.errors import ConfigError, did_you_mean
from agentsgym.interruptions import Interruption
from agentsgym.texts import sentence_of, shortened, shown, visible
from agentsgym.types import Action, Message, ToolCall, TurnRequest

_MAX_BYTES = 20_000  # length of a message that is shown

Show = Callable[[str, str], None]


class PlayerLeft(Interruption):  # not an error: the end of the input
    """The person ended the input (Ctrl-D), which ends the rollout as Ctrl-C does."""


class HumanAgent(Agent):
    r"""An agent that prompts a person for every action, one session after the other.

    New messages are shown, then a line is read; a line that ends with a backslash continues on the next. If the
    environment has tools, a line may call one or more of them: ``price(good="apples")``, ``add(3, 4)``, or
    ``{"name": "price", "arguments": {"good": "apples"}}``; after an invalid call, the person is prompted again. Control
    characters and escape sequences are shown escaped.

    Args:
        read: Function that shows a prompt and reads a line; ``EOFError`` ends the rollout.
        show: Function that shows a text with its role (``"system"``, ``"user"``, ``"tool"``, ``"tools"`` for the list
            of tools, ``"note"`` for the agent's own messages); by default, texts are printed.

    >>> lines = iter(["add(3, c)", "add(3, b=4)"])
    >>> tool = {"function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}}
    >>> agent = HumanAgent(read=lambda prompt: next(lines), show=lambda role, text: None)
    >>> messages = [{"role": "user", "content": "3 + 4?"}]
    >>> request = TurnRequest(session_id="", messages=messages, token_ids=(), tools=[tool])
    >>> agent.act([request])[0].tool_calls[0].arguments
    {'a': 3, 'b': 4}
    """

    def __init__(self, *, read: Callable[[str], str] = input, show: Show | None = None) -> None:
        self._read = read
        self._show = _print if show is None else show

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Prompt for each answer in turn.

        Raises:
            PlayerLeft: The input has ended.
        """
        return [self._action(request) for request in requests]

    def _action(self, request: TurnRequest) -> Action:
        seen: int = request.agent_state or 0
        tools = "" if seen else "\n".join(map(signature, request.tools))
        for message in new_messages(request):
            if tools and message["role"] != "system":
                self._show("tools", tools)
                tools = ""
            self._show(message["role"], message["content"])
        while True:
            try:
                line = self._read("> ")
                while line.endswith("\\"):
                    line = line[:-1] + "\n" + self._read("… ")
            except EOFError:
                raise PlayerLeft from None
            try:
                calls = read_calls(line, request.tools)
            except ConfigError as error:
                self._show("note", f"{sentence_of(error)}\nPlease try again.")
            else:
                # The answer becomes the next message of the conversation.
                return Action(text="" if calls else line, tool_calls=calls, agent_state=len(request.messages) + 1)


def new_messages(request: TurnRequest) -> Sequence[Message]:
    """Return the messages after the last action, if ``agent_state`` is the number of messages up to it."""
    seen = request.agent_state or 0
    known = len(request.messages) if seen > len(request.messages) else seen
    return request.messages[known:] or request.messages[-1:]  # of a rewritten history, show at least the last message


def signature(tool: Mapping[str, Any]) -> str:
    """Describe a tool's arguments and purpose in one line.

    >>> signature({"name": "price", "description": "Look it up.", "parameters": {"properties": {"good": {}}}})
    'price(good): Look it up.'
    """
    function: Mapping[str, Any] = tool.get("function", tool)
    purpose = str(function.get("description") or "").strip().partition("\n")[0]
    return f"{function.get('name')}({', '.join(_parameters(tool))}){f': {purpose}' if purpose else ''}"


def read_calls(line: str, tools: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, ...]:
    """Parse the tool calls in a typed line; none if the line is not a call.

    Args:
        line: The typed line, with calls in Python syntax or in JSON.
        tools: The tools' JSON schemas.

    Raises:
        ConfigError: The line looks like a call but is not a valid one.
    """
    known = {str(tool.get("function", tool).get("name")): tool for tool in tools}
    text = line.strip()
    if not known or not text:
        return ()
    name = text.partition("(")[0].strip()
    if text[0] in "{[":
        return _json_calls(text, known)
    if "(" not in text or not (name in known or (name.isidentifier() and text.endswith(")"))):
        return ()
    return _python_calls(text, known)


def _json_calls(text: str, known: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"this is not valid JSON: {sentence_of(error)}") from error
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    calls: list[ToolCall] = []
    for item in items:
        fields: dict[str, Any] = dict(cast("Mapping[str, Any]", item)) if isinstance(item, Mapping) else {}
        name, arguments = fields.get("name"), fields.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            raise ConfigError(
                f'a call in JSON must be {{"name": …, "arguments": {{…}}}}, got {shown(cast("object", item), 100)}'
            )
        calls.append(_call(name, dict(cast("Mapping[str, Any]", arguments)), known))
    return tuple(calls)


def _python_calls(text: str, known: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ConfigError(
            f"this is not a valid call ({sentence_of(error, 100)}): write it as name(argument=value)"
        ) from error
    calls: list[ToolCall] = []
    for statement in statements:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ConfigError("each call must be written as name(argument=value); separate several calls with ';'")
        name = call.func.id
        names = _parameters(known.get(name, {}))
        if len(call.args) > len(names) and name in known:
            raise ConfigError(f"{name} accepts {len(names)} arguments, got {len(call.args)}")
        given = [*zip(names, call.args, strict=False), *((one.arg, one.value) for one in call.keywords)]
        arguments: dict[str, Any] = {}
        for key, value in given:
            if key is None or key in arguments:
                raise ConfigError(f"each argument of {name} must be passed once, by name or by position")
            try:
                arguments[key] = ast.literal_eval(value)
            except (ValueError, TypeError, MemoryError, RecursionError) as error:
                raise ConfigError(f"the argument {key} of {name} must be a literal, such as 3 or 'text'") from error
        calls.append(_call(name, arguments, known))
    return tuple(calls)


def _call(name: str, arguments: dict[str, Any], known: Mapping[str, Any]) -> ToolCall:
    if name not in known:
        raise ConfigError(f"there is no tool {shown(name, 100)}{did_you_mean(name, known)}")
    return ToolCall(name=name, arguments=arguments)


def _parameters(tool: Mapping[str, Any]) -> list[str]:
    function: Mapping[str, Any] = tool.get("function", tool)
    parameters: Mapping[str, Any] = function.get("parameters") or {}
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    return [*properties]


def _print(role: str, text: str) -> None:
    mark = "" if role == "user" else f"[{role}] "
    print(f"{mark}{visible(shortened(text, _MAX_BYTES))}", flush=True)
