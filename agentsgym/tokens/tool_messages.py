"""Messages about tools: calls and results as chat templates accept them, or as text if a template does not.

The text form is that of Hermes, which many models were trained on::

    <tool_call>                                               <tool_response>
    {"name": "add", "arguments": {"a": 1, "b": 2}}            3
    </tool_call>                                              </tool_response>
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from agentsgym.types import Message, ToolCall

TEXT_TAGS = "<tool_call></tool_call><tool_response></tool_response>"  # the tags of the text form
_GENERATED_ID = re.compile(r"call(\d{5,9})")


def structured_calls(calls: Sequence[ToolCall], num_earlier: int) -> list[dict[str, Any]]:
    """Convert the well-formed calls of an assistant message to the format of messages.

    Args:
        calls: The calls; those with an error are omitted, and so are arguments that are nested too deeply.
        num_earlier: The number of earlier calls in the conversation, from which calls without an id get one.
    """
    return [
        {
            "type": "function",
            "id": f"call{number:05d}" if call.id is None else call.id,
            "function": {"name": _encodable(call.name, ""), "arguments": _encodable(call.arguments, {})},
        }
        for number, call in enumerate(calls, num_earlier)
        if call.error is None
    ]


def _encodable(value: Any, default: Any) -> Any:
    """Copy a JSON value with lone surrogates replaced; ``default`` if it is nested too deeply."""
    try:
        texts = {text: text.encode("utf-8", "replace").decode("utf-8") for text in strings_in(value)}
        return with_strings(value, texts)
    except RecursionError:
        return default


def with_call_ids(
    messages: Sequence[Message], calls: Sequence[ToolCall], structured: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """Add to each tool message the name and id of the call that it responds to, where they are missing."""
    well_formed = iter(structured)
    in_order = [next(well_formed, None) if call.error is None else None for call in calls]
    if sum(message["role"] == "tool" for message in messages) == len(structured):
        in_order = [*structured]  # malformed calls get no response, or one in another role
    by_id = {call["id"]: call for call in structured}
    remaining, labeled = iter(in_order), list[Message]()
    for message in messages:
        if message["role"] != "tool":
            labeled.append(message)
            continue
        next_call = next(remaining, None)
        fields = cast("Mapping[str, Any]", message)
        given: Any = {key: _encodable(str(fields[key]), "") for key in ("name", "tool_call_id") if key in fields}
        call = by_id.get(given["tool_call_id"]) if "tool_call_id" in given else next_call
        known = {} if call is None else {"name": call["function"]["name"], "tool_call_id": call["id"]}
        labeled.append(cast("Message", {**message, **known, **given}))
    return labeled


class TextForm(NamedTuple):
    """How calls are written into the text of an answer, for a template that shows tools but renders no calls.

    Attributes:
        opens: Opening marker of a block of calls.
        closes: Closing marker; empty if the end of the turn closes a block.
        is_python: Whether a block is a Python list of calls rather than a JSON list of objects.
    """

    opens: str
    closes: str
    is_python: bool = False

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Write the calls of an answer in one block."""
        if not self.is_python:
            return f"{self.opens}{json.dumps([*map(_named_call, calls)], ensure_ascii=False)}{self.closes}"
        written = [
            f"{name}({', '.join(f'{key}={_python(value)}' for key, value in given.items())})"
            for name, given in (_named_call(call).values() for call in calls)
        ]
        return f"{self.opens}[{', '.join(written)}]{self.closes}"


NATIVE_FORMS: Final = (
    TextForm("<|tool_call_start|>", "<|tool_call_end|>", is_python=True),  # LFM2
    TextForm("<|tool_call|>", "<|/tool_call|>"),  # Phi 4 mini
    TextForm("<|tool_call|>", ""),  # Granite 3
)


def native_form(tokenizer: Any) -> TextForm | None:
    """Find the form of which the tokenizer has every marker as a token; None for the text form."""
    added: Mapping[str, int] = tokenizer.get_added_vocab()
    return next((one for one in NATIVE_FORMS if {one.opens, one.closes} - {""} <= added.keys()), None)


def _named_call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}


def _python(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_python, cast('list[Any]', value)))}]"
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return f"{{{', '.join(f'{_python(key)}: {_python(item)}' for key, item in items)}}}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def with_text_calls(message: Mapping[str, Any], form: TextForm | None = None) -> Message:
    """Move the calls of an assistant message into its text, for a template that does not support calls."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls", ())
    text: str = message["content"]
    if form is not None and calls:
        written = [form.write(calls)]
    else:
        objects = [json.dumps(_named_call(call), ensure_ascii=False) for call in calls]
        written = [f"<tool_call>\n{one}\n</tool_call>" for one in objects]
    between = "\n" if text and written and not text.endswith(("\n", "</think>")) else ""
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return cast("Message", {**rest, "content": text + between + "\n".join(written)})


def as_written(message: Message) -> Message:
    """Return an answer with its reasoning in its text, as it was written, if the chat template has no form for it."""
    if "written" not in message:
        return message
    rest = {key: value for key, value in message.items() if key not in {"written", "reasoning_content"}}
    return cast("Message", {**rest, "content": message["written"]})


def short_id(call_id: str) -> str:
    """Return an id of nine letters and digits, for templates that accept no others (Mistral)."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def named_id(call_id: str, name: str) -> str:
    """Return an id that names the tool, for templates that render only the id and arguments of a call (Kimi K2).

    >>> named_id("call00003", "look"), named_id("functions.look:3", "look")
    ('functions.look:3', 'functions.look:3')
    """
    if call_id.startswith(f"functions.{name}:"):
        return call_id
    number = _GENERATED_ID.fullmatch(call_id)
    return f"functions.{name}:{int(number[1]) if number else call_id}"


def strings_in(value: Any) -> list[str]:
    """List every string in a JSON value, keys included, in a fixed order."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return [text for key, item in items for text in [*strings_in(key), *strings_in(item)]]
    if isinstance(value, list | tuple):
        return [text for item in cast("Sequence[Any]", value) for text in strings_in(item)]
    return []


def with_strings(value: Any, texts: Mapping[str, str]) -> Any:
    """Copy a JSON value with its strings, keys included, replaced by the table."""
    if isinstance(value, str):
        return texts[value]
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {with_strings(key, texts): with_strings(item, texts) for key, item in items}
    if isinstance(value, list | tuple):
        return [with_strings(item, texts) for item in cast("Sequence[Any]", value)]
    return value
