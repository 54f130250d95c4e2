"""The formats of tool calls in known families of chat templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, cast

from agentsgym.tokens.calls.forms import (
    ChannelForm,
    Form,
    MarkedForm,
    Read,
    ReadString,
    bare_string,
    escaped_string,
    python_calls,
    read_or_failed,
)
from agentsgym.tokens.calls.thoughts import ThoughtMarkers
from agentsgym.tokens.calls.values import (
    MAX_CALLS,
    ArgumentSchemas,
    MalformedCallError,
    gemma_arguments,
    is_finished,
    malformed_call,
    read_json,
    tool_call,
    tool_call_from_object,
    typed_arguments,
    whole_json,
)
from agentsgym.types import ToolCall


def json_form(opens: str, closes: str, *, ends_with_turn: bool = False) -> MarkedForm:
    """Calls written as JSON objects with a name and arguments, or lists of them, between two markers."""
    return MarkedForm(
        opens=re.compile(re.escape(opens)),
        closes=re.compile(re.escape(closes)) if closes else _TURN_END,
        read=_json_calls,
        is_json=True,
        ends_with_turn=ends_with_turn or not closes,
    )


def _json_calls(
    body: str, _schemas: ArgumentSchemas, call_of_one: Callable[[Any], ToolCall] = tool_call_from_object
) -> list[ToolCall]:
    """Parse one object, several on lines of their own, or a list of objects, each separately."""
    text = body.strip()
    if not text.startswith("["):
        return _json_lines(text, call_of_one)
    calls: list[ToolCall] = []
    position = 1
    while len(calls) <= MAX_CALLS and text[position:].strip("\n\t ,]"):
        try:
            value, position = read_json(text, position)
        except MalformedCallError as error:
            calls.append(malformed_call(error))
            later = _NEXT_ITEM.search(text, position + 1)
            if later is None or not is_finished(text[position : later.start()]):
                break
            position = later.start()
        else:
            calls += read_or_failed(lambda value=value: [call_of_one(value)])
            comma = _COMMA.match(text, position)
            position = comma.end() if comma else position
    return calls or [malformed_call(MalformedCallError("is an empty list"))]


def _json_lines(text: str, call_of_one: Callable[[Any], ToolCall]) -> list[ToolCall]:
    """Parse one object, or several on lines of their own, each separately."""
    lines = _OBJECT_LINE.split(text)
    if len(lines) == 1:
        return [call_of_one(whole_json(text))]
    calls: list[ToolCall] = []
    for line in lines:
        calls += read_or_failed(lambda line=line: [call_of_one(whole_json(line))])
        if calls[-1].error is not None and not is_finished(line):
            break
    return calls


class _Tags(NamedTuple):
    """The tags around an argument in one form.

    Attributes:
        whole: Matches an argument; its groups are ``key`` and ``value``.
        begins: Opening tag of an argument, with ``{}`` for its key.
        ends: Closing tag of an argument.
    """

    whole: re.Pattern[str]
    begins: str
    ends: str


def _tagged(name: str, body: str, tags: _Tags, schemas: ArgumentSchemas) -> list[ToolCall]:
    """Parse the tagged arguments of one call; text outside the tags is an error."""
    # Without any end, each beginning would search all of the text.
    if rest := (tags.whole.sub("", body) if tags.ends in body else body).strip():
        return [malformed_call(MalformedCallError(f"has {rest[:40]!r} outside its arguments"), name)]
    pairs = [(match["key"].strip(), match["value"]) for match in tags.whole.finditer(body)]
    # If a value contains the beginning of another argument, a tag was misspelled. A misspelled opening tag is found
    # after the tag that closes the previous value.
    known = "|".join(map(re.escape, schemas.get(name, ())))
    begins = re.escape(tags.begins).replace(r"\{\}", f"(?P<key>{known})")
    spoiled = rf"{re.escape(tags.ends)}\s*[^\n]{{0,30}}?(?P<other>{known})\b[\"<>]"
    for key, value in pairs:
        found = re.search(f"{begins}|{spoiled}", value) if known and "<" in value else None
        if found is not None:
            other = found["key"] or found["other"]
            error = MalformedCallError(f"has an argument {key!r} that holds the beginning of {other!r}: check its tags")
            return [malformed_call(error, name)]
    return _call(name, lambda: typed_arguments(name, pairs, schemas))


def _all_tagged(
    pattern: re.Pattern[str], tags: _Tags, written_as: str, body: str, schemas: ArgumentSchemas
) -> list[ToolCall]:
    """Parse one or several calls with tagged arguments."""
    calls: list[ToolCall] = []
    for match in pattern.finditer(body):
        calls += _tagged(match["name"].strip(), match["body"], tags, schemas)
    if rest := _WRAPPER.sub("", pattern.sub("", body)).strip():
        raise MalformedCallError(f"must be written as {written_as}, not {rest[:40]!r}")
    return calls or [malformed_call(MalformedCallError(f"must be written as {written_as}"))]


def _call(name: str, arguments: Callable[[], Any], call_id: str | None = None) -> list[ToolCall]:
    """Make one call from a name and arguments that may be malformed."""
    return read_or_failed(lambda: [tool_call(name, arguments(), call_id)], name)


def _glm_calls(body: str, schemas: ArgumentSchemas) -> list[ToolCall]:
    name, tag, arguments = body.partition("<arg_key>")
    if not name.strip() or len(name.split()) > 1:
        raise MalformedCallError("must name the tool first, then <arg_key>…</arg_key><arg_value>…</arg_value>")
    return _tagged(name.strip(), tag + arguments, _GLM_TAGS, schemas)


def _python_form(opens: str, closes: str, read_string: ReadString) -> MarkedForm:
    """Calls written as a Python list between two markers."""
    return _marked(
        re.escape(opens),
        re.escape(closes),
        lambda body, _schemas: python_calls(body, read_string) or [malformed_call(MalformedCallError("is empty"))],
    )


def _gemma_calls(body: str, _schemas: ArgumentSchemas) -> list[ToolCall]:
    head = _GEMMA_HEAD.fullmatch(body)
    if head is None:
        raise MalformedCallError("must be written as call:name{key:value}")
    return _call(head["name"], lambda: gemma_arguments(head["arguments"]))


def _mistral_calls(body: str, schemas: ArgumentSchemas) -> list[ToolCall]:
    """Parse a list of JSON objects, or a name and its arguments after ``[ARGS]``."""
    named = _MISTRAL_NAMED.fullmatch(body)
    if named is None:
        return _json_calls(body, schemas)
    return _call(named["name"], lambda: whole_json(named["arguments"]), named["id"])


def _deepseek_calls(body: str, _schemas: ArgumentSchemas) -> list[ToolCall]:
    """Parse ``function<sep>name`` and JSON in a code fence (V3), or ``name<sep>`` and JSON (V3.1)."""
    name, _, arguments = body.partition("<\uff5ctool\u2581sep\uff5c>")
    if name.strip() == "function" and "```" in arguments:
        name, _, fenced = arguments.partition("```")
        arguments = fenced.removeprefix("json").rpartition("```")[0]
    return _call(name, lambda: whole_json(arguments))


def _command_calls(body: str, schemas: ArgumentSchemas) -> list[ToolCall]:
    """Parse a list of objects with the key ``tool_name``; their ids, which restart in each answer, are ignored."""

    def call_of_one(value: Any) -> ToolCall:
        if not isinstance(value, dict):
            return tool_call_from_object(value)
        fields = cast("dict[str, Any]", value)
        return tool_call_from_object(
            {_COMMAND_KEYS.get(key, key): one for key, one in fields.items() if key != "tool_call_id"}
        )

    return _json_calls(body, schemas, call_of_one)


def _kimi_calls(body: str, _schemas: ArgumentSchemas) -> list[ToolCall]:
    """Parse ``functions.name:number``, which is also the id of the call, and JSON."""
    written, mark, arguments = body.partition("<|tool_call_argument_begin|>")
    name = _KIMI_NUMBER.sub("", written.strip()).removeprefix("functions.")
    if not mark:
        raise MalformedCallError("must be written as functions.name:number<|tool_call_argument_begin|>{…}")
    return _call(name, lambda: whole_json(arguments), written.strip())


def _minimax_calls(body: str, schemas: ArgumentSchemas) -> list[ToolCall]:
    """Parse one or several ``<invoke name="name"><parameter name="key">…``, each separately."""
    calls: list[ToolCall] = []
    for match in _INVOKE.finditer(body):
        if match["closed"]:
            calls += _tagged(match["name"].strip(), match["body"], _INVOKE_TAGS, schemas)
        else:
            calls.append(malformed_call(MalformedCallError("is not closed by </invoke>"), match["name"].strip()))
    if rest := _INVOKE.sub("", body).strip():
        calls.append(
            malformed_call(MalformedCallError(f"must be written in <invoke name=…>…</invoke>, not {rest[:40]!r}"))
        )
    return calls or [malformed_call(MalformedCallError("is empty"))]


def _dsml_calls(body: str, _schemas: ArgumentSchemas) -> list[ToolCall]:
    """Parse ``invoke`` tags with ``parameter`` tags, whose attribute ``string`` distinguishes text from JSON."""
    calls: list[ToolCall] = []
    if "</\uff5cDSML\uff5cinvoke>" not in body:
        raise MalformedCallError("is not closed by </\uff5cDSML\uff5cinvoke>")
    for match in _DSML_INVOKE.finditer(body):
        name, written = match["name"], match["body"]
        if rest := _DSML_PARAMETER.sub("", written).strip():
            calls.append(malformed_call(MalformedCallError(f"has {rest[:40]!r} outside its arguments"), name))
            continue
        pairs = [(one["key"], one) for one in _DSML_PARAMETER.finditer(written)]
        if len(dict(pairs)) < len(pairs):
            calls.append(malformed_call(MalformedCallError("gives an argument twice"), name))
            continue
        calls += _call(
            name,
            lambda pairs=pairs: {
                key: one["value"] if one["string"] == "true" else whole_json(one["value"]) for key, one in pairs
            },
        )
    if rest := _DSML_INVOKE.sub("", body).strip():
        calls.append(malformed_call(MalformedCallError(f"has {rest[:40]!r} outside <\uff5cDSML\uff5cinvoke>")))
    return calls or [malformed_call(MalformedCallError("is empty"))]


_TURN_END = re.compile(r"</s>|<\|eot_id\|>|<\|eom_id\|>|<\|im_end\|>")
_OBJECT_LINE = re.compile(r"\n(?=\{\s*\"name\")")
_COMMA = re.compile(r"\s*,\s*")
_NEXT_ITEM = re.compile(r"\{\s*\"(?:name|tool_name|tool_call_id)\"")
_COMMAND_KEYS: Final = {"tool_name": "name"}
_KIMI_NUMBER = re.compile(r":\d+\Z")
_INVOKE = re.compile(
    r'<invoke name="(?P<name>[^"]*)">(?P<body>.*?)(?:(?P<closed></invoke>)(?=\s*(?:<invoke|\Z))|(?=<invoke )|\Z)',
    re.DOTALL,
)
_INVOKE_TAGS = _Tags(
    re.compile(r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>(?=\s*(?:<parameter |\Z))', re.DOTALL),
    '<parameter name="{}">',
    "</parameter>",
)
_DSML_INVOKE = re.compile(
    '<\uff5cDSML\uff5cinvoke name="(?P<name>[^"]*)">(?P<body>.*?)'
    "</\uff5cDSML\uff5cinvoke>(?=\\s*(?:<\uff5cDSML\uff5cinvoke|\\Z))",
    re.DOTALL,
)
_DSML_PARAMETER = re.compile(
    '<\uff5cDSML\uff5cparameter name="(?P<key>[^"]+)" string="(?P<string>true|false)">(?P<value>.*?)'
    "</\uff5cDSML\uff5cparameter>(?=\\s*(?:<\uff5cDSML\uff5cparameter|\\Z))",
    re.DOTALL,
)
_FUNCTION = re.compile(r"<function=(?P<name>[^>\n]*)>(?P<body>.*?)(?:</function>(?=\s*(?:<function=|$))|$)", re.DOTALL)
_INLINE_TAGS = _Tags(
    re.compile(
        r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>(?=\s*(?:<parameter=|</function>|$))", re.DOTALL
    ),
    "<parameter={}>",
    "</parameter>",
)
# Qwen3-Coder writes a line break before and after each value.
_XML_TAGS = _INLINE_TAGS._replace(
    whole=re.compile(_INLINE_TAGS.whole.pattern.replace("(?P<value>.*?)", r"\n?(?P<value>.*?)\n?"), re.DOTALL)
)
_GLM_TAGS = _Tags(
    re.compile(
        r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>(?=\s*(?:<arg_key>|$))", re.DOTALL
    ),
    "<arg_key>{}</arg_key>",
    "</arg_value>",
)
_GEMMA_HEAD = re.compile(r"call:(?P<name>[\w./-]+)\s*(?P<arguments>.*)", re.DOTALL)
_MISTRAL_NAMED = re.compile(
    r"\s*(?P<name>[\w./-]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?\s*(?P<arguments>\{.*)", re.DOTALL
)
_ATEM_CALL = re.compile(r'<atem:invoke name="(?P<name>[^"]*)">(?P<body>.*?)</atem:invoke>', re.DOTALL)
_WRAPPER = re.compile(r"</?atem:function_calls>")
_ATEM_TAGS = _Tags(
    re.compile(
        r'<atem:parameter name="(?P<key>[^"]+)">(?P<value>.*?)</atem:parameter>(?=\s*(?:<atem:parameter|$))', re.DOTALL
    ),
    '<atem:parameter name="{}">',
    "</atem:parameter>",
)


_XML_SHAPE = "<function=name><parameter=key>…</parameter></function>"
read_xml: Final = partial(_all_tagged, _FUNCTION, _XML_TAGS, _XML_SHAPE)
read_inline: Final = partial(_all_tagged, _FUNCTION, _INLINE_TAGS, _XML_SHAPE)


def _marked(opens: str, closes: str, read: Read, **more: Any) -> MarkedForm:
    return MarkedForm(opens=re.compile(opens), closes=re.compile(closes), read=read, **more)


HERMES: Final = json_form("<tool_call>", "</tool_call>")
FORMS: Final[Mapping[str, Form]] = {
    "hermes": HERMES,
    "xml": _marked("<tool_call>", "</tool_call>", read_xml, ends=re.compile(r"(?<=</function>)\s*</tool_call>")),
    "xml, inline": _marked(
        "<tool_call>", "</tool_call>", read_inline, ends=re.compile(r"(?<=</function>)\s*</tool_call>")
    ),
    "glm": _marked("<tool_call>", "</tool_call>", _glm_calls, ends=re.compile(r"(?<=</arg_value>)\s*</tool_call>")),
    "lfm": _python_form("<|tool_call_start|>", "<|tool_call_end|>", bare_string),
    "lfm, escaped": _python_form("<|tool_call_start|>", "<|tool_call_end|>", escaped_string),
    "gemma": _marked(
        r"<\|tool_call>",
        r"<tool_call\|>",
        _gemma_calls,
        thinks=ThoughtMarkers("<|channel>thought\n", "<channel|>"),
        wraps=re.compile(r"<\|tool_response>|<turn\|>"),
    ),
    "gpt-oss": ChannelForm(read=lambda name, body, _schemas: [tool_call(name, whole_json(body))]),
    "muse": ChannelForm(
        read=lambda _name, body, schemas: _all_tagged(
            _ATEM_CALL, _ATEM_TAGS, '<atem:invoke name="…">…</atem:invoke>', body, schemas
        )
    ),
    "mistral": _marked(
        r"\[TOOL_CALLS\]",
        r"</s>|(?=\[TOOL_CALLS\])",
        _mistral_calls,
        is_json=True,
        ends_with_turn=True,
        thinks=ThoughtMarkers("[THINK]", "[/THINK]"),
    ),
    "deepseek": _marked(
        "<\uff5ctool\u2581call\u2581begin\uff5c>",
        "<\uff5ctool\u2581call\u2581end\uff5c>",
        _deepseek_calls,
        wraps=re.compile("<\uff5ctool\u2581calls\u2581(?:begin|end)\uff5c>"),
    ),
    "kimi": _marked(
        r"<\|tool_call_begin\|>",
        r"<\|tool_call_end\|>",
        _kimi_calls,
        wraps=re.compile(r"<\|tool_calls_section_(?:begin|end)\|>"),
    ),
    "command": _marked(
        r"<\|START_ACTION\|>",
        r"<\|END_ACTION\|>",
        _command_calls,
        is_json=True,
        thinks=ThoughtMarkers("<|START_THINKING|>", "<|END_THINKING|>"),
        wraps=re.compile(r"<\|(?:START|END)_RESPONSE\|>"),
    ),
    "minimax": _marked(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        _minimax_calls,
        ends=re.compile(r"(?<=</invoke>)\s*</minimax:tool_call>"),
    ),
    "seed": _marked(
        "<seed:tool_call>",
        "</seed:tool_call>",
        read_inline,
        ends=re.compile(r"(?<=</function>)\s*</seed:tool_call>"),
        thinks=ThoughtMarkers("<seed:think>", "</seed:think>"),
    ),
    "dsml": _marked(
        "<\uff5cDSML\uff5c(?:function|tool)_calls>",
        "</\uff5cDSML\uff5c(?:function|tool)_calls>",
        _dsml_calls,
        ends=re.compile("(?<=</\uff5cDSML\uff5cinvoke>)\\s*</\uff5cDSML\uff5c(?:function|tool)_calls>"),
    ),
    "python": _python_form("<|python_start|>", "<|python_end|>", bare_string),
    "python, escaped": _python_form("<|python_start|>", "<|python_end|>", escaped_string),
    "llama": _marked(
        r"(?:<\|python_tag\|>\s*|;\s*|(?<=[;}])\s*|(?m:^)[ \t]*)"
        r"(?=\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?\"name\"\s*:\s*\"[^\"]*\"\s*,"
        r"\s*\"(?:parameters|arguments)\"\s*:)|<\|python_tag\|>|\A\s*(?=\{\s*\"name\"\s*:)",
        r"<\|eot_id\|>|<\|eom_id\|>|(?<!\s)\s*;",  # matched once, not from each position in white space
        lambda body, _schemas: [tool_call_from_object(whole_json(body))],
        is_json=True,
        ends_with_turn=True,
    ),
}
"""The forms by family, in the order in which they are tried."""
