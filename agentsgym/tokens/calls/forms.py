"""Split an answer into calls, reasoning and text: at markers, as messages with headers, or as calls in Python.

The answer is decoded with its control tokens, which are the only markers of calls in some forms.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agentsgym.tokens.calls.thoughts import THINK, ThoughtMarkers
from agentsgym.tokens.calls.values import (
    MAX_CALLS,
    WORDS,
    ArgumentSchemas,
    MalformedCallError,
    literal,
    malformed_call,
    read_json,
    skip_space,
    tool_call,
    whole_json,
)
from agentsgym.types import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The content of an answer.

    Attributes:
        content: The text without calls and reasoning, but with malformed calls.
        reasoning: The reasoning, which may be empty; None if there is none.
        calls: The calls in order; malformed ones have an ``error``.
        is_open: Whether the answer ends in reasoning that is not closed.
        open_thought: That reasoning with its control tokens, which may be the markers of calls.
        failed: The blocks of malformed calls, as they are in the content; empty for one that is not closed.
        is_marked: Whether the content has a control token that only calls have.
    """

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    is_open: bool = False
    open_thought: str | None = None
    failed: tuple[str, ...] = ()
    is_marked: bool = False


@dataclass(slots=True)
class _Parts:
    """The parts read so far."""

    content: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    failed: list[str] = field(default_factory=list[str])
    is_open: bool = False

    def take(self, calls: list[ToolCall], written: str, *, is_closed: bool = True) -> None:
        """Add the calls of one block; a block with a malformed call stays in the content."""
        self.calls += calls
        if any(call.error is not None for call in calls):
            self.content.append(written)
            self.failed.append(written if is_closed else "")

    def answer(self) -> Answer:
        calls = self.calls
        if len(calls) > MAX_CALLS:
            too_many = MalformedCallError(f"is one of more than {MAX_CALLS} in one answer; the rest is not read")
            calls = [*calls[:MAX_CALLS], malformed_call(too_many)]
        return Answer(
            content="".join(self.content),
            reasoning="\n".join(map(str.strip, self.reasoning)).strip() if self.reasoning else None,
            calls=tuple(calls),
            is_open=self.is_open,
            failed=tuple(self.failed),
        )


DATA: Final = ("{", "```")
"""The beginnings of an answer whose strings may quote a marker."""
NEVER: Final = re.compile(r"(?!)")
Read = Callable[[str, ArgumentSchemas], list[ToolCall]]


def read_or_failed(read: Callable[[], list[ToolCall]], name: str = "") -> list[ToolCall]:
    """Parse calls; return a single call with an error if they cannot be parsed."""
    try:
        return read()
    except MalformedCallError as error:
        return [malformed_call(error, name.strip())]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedForm:
    """Calls between markers in the text of an answer.

    Attributes:
        opens: Opening marker of a block.
        closes: Closing marker of a block.
        ends: Closing marker of a block after the end of a call, which an argument that contains the marker does not
            match; None if the first closing marker ends a block.
        read: Parses the calls of a block.
        is_json: Whether a block begins with a JSON value, whose strings may contain the closing marker.
        ends_with_turn: Whether the end of the turn also ends a block.
        thinks: Opening and closing markers of reasoning.
        thinks_first: Whether reasoning is only at the start of an answer.
        wraps: Markers around blocks, which are removed.
    """

    opens: re.Pattern[str]
    closes: re.Pattern[str]
    read: Read
    ends: re.Pattern[str] | None = None
    is_json: bool = False
    ends_with_turn: bool = False
    thinks: ThoughtMarkers = THINK
    thinks_first: bool = False
    wraps: re.Pattern[str] | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """The markers that answers with reasoning contain, one at least unless all of it is cut off."""
        return self.thinks[:2]

    def is_begun_in(self, prompt: str) -> bool:
        """Whether a generation prompt begins reasoning."""
        begins, ends, _ = self.thinks
        return prompt.rfind(begins.strip()) > prompt.rfind(ends)

    def answer(self, prompt: str | None, text: str, schemas: ArgumentSchemas) -> Answer:
        """Parse an answer.

        Args:
            prompt: The generation prompt, in which reasoning may begin. If None, it is unknown, and reasoning that ends
                but does not begin in the answer is assumed to begin in the prompt.
            text: The answer, with its control tokens.
            schemas: The schemas of the tools' arguments.
        """
        parts = _Parts()
        thought_end = self._end_of_begun_thought(text, schemas) if prompt is None else None
        begins, ends, _ = self.thinks
        first, position = self._next(text, 0), 0
        if thought_end is not None:
            position = self._thought(text, 0, parts, thought_end)
        elif prompt and self.is_begun_in(prompt):
            text_begins = re.match(rf"\s*{re.escape(begins)}", text)
            position = self._thought(text, text_begins.end() if text_begins else 0, parts)
        elif (
            prompt is not None
            and not self.thinks_first
            and ends in text[: len(text) if first is None else first.start()]
            and not text.lstrip().startswith(DATA)
        ):
            position = self._thought(text, 0, parts)  # it began in the prompt of another template
        if self._is_data(text[position:]):
            parts.content.append(text[position:])
            position = len(text)
        while len(parts.calls) <= MAX_CALLS and (begin := self._next(text, position)) is not None:
            parts.content.append(text[position : begin.start()])
            if text.startswith(begins, begin.start()):
                position = self._thought(text, begin.end(), parts)
            else:
                position = self._block(text, begin, parts, schemas)
        parts.content.append(text[position:])
        answer = parts.answer()
        if self.wraps is None:
            return answer
        return replace(answer, content=self.wraps.sub("", answer.content))

    def _end_of_begun_thought(self, text: str, schemas: ArgumentSchemas) -> int | None:
        """Find the end of reasoning that begins before the answer; None if there is none.

        A marker inside a well-formed call is part of one of its strings, as in an answer that is JSON or code.
        """
        if text.lstrip().startswith(DATA):
            return None
        position, end = 0, text.find(self.thinks[1])
        for _ in range(MAX_CALLS):
            begin = self._next(text, position) if end >= 0 else None
            if begin is None or begin.start() > end:
                break
            if text.startswith(self.thinks[0], begin.start()):
                return None
            block = _Parts()
            position = self._block(text, begin, block, schemas)
            if position > end:
                if any(call.error is not None for call in block.calls):
                    break
                end = text.find(self.thinks[1], position)
        return None if end < 0 or self.thinks[0] in text[position:end] else end

    def _is_data(self, text: str) -> bool:
        """Whether a text is a JSON object rather than a call; markers in its strings are quoted text."""
        text = text.strip()
        if not text.startswith("{") or self.opens.match(text):
            return False
        try:
            return read_json(text)[1] == len(text)
        except MalformedCallError:
            return False

    def _thought(self, text: str, start: int, parts: _Parts, end: int | None = None) -> int:
        end = text.find(self.thinks[1], start) if end is None else end
        parts.is_open = end < 0
        parts.reasoning.append(text[start : len(text) if end < 0 else end])
        return len(text) if end < 0 else end + len(self.thinks[1])

    def _next(self, text: str, position: int) -> re.Match[str] | None:
        """Find the next reasoning or block."""
        thought = re.compile(re.escape(self.thinks[0])).search(text, position)
        if thought and self.thinks_first and text[: thought.start()].strip():
            thought = None
        found = (None if self.opens is NEVER else self.opens.search(text, position), thought)
        return min((match for match in found if match), key=lambda match: match.start(), default=None)

    def _next_block(self, text: str, start: int, end_of_call: re.Match[str] | None) -> re.Match[str] | None:
        """Find the next opening marker; one inside the arguments of a call begins no call."""
        other = self.opens.search(text, start)
        while end_of_call and other and other.start() < end_of_call.start() and not _BEGIN.match(text, other.end()):
            other = self.opens.search(text, other.end())
        return other

    def _outer_end(self, text: str, start: int) -> re.Match[str] | None:
        """Find the end of a block whose arguments quote another, which begins before ``start``; None if there is none.

        The block ends behind the end of the quoted one; if only one of them ends, it is not closed.
        """
        depth, position = 2, start
        close = self.closes.search(text, start)
        while depth and close is not None:
            begin = self.opens.search(text, position, close.start())
            depth += -1 if begin is None else 1
            position = close.end() if begin is None else begin.end()
            close = self.closes.search(text, position) if begin is None and depth else close
        return close

    def _block(self, text: str, begin: re.Match[str], parts: _Parts, schemas: ArgumentSchemas) -> int:
        """Parse one block; return the index after it."""
        start, after = begin.end(), None
        if self.is_json:
            with contextlib.suppress(MalformedCallError):
                after = read_json(text, start)[1]
        is_closed = True
        if after is not None and self.ends_with_turn:  # text after the value is not part of the call
            close = self.closes.match(text, after)
            body_end, end = after, after if close is None else close.end()
        else:
            close = self.closes.search(text, after or start)
            end_of_call = self.ends.search(text, start) if self.ends else None
            other = self._next_block(text, (after or start) + 1, end_of_call)
            if end_of_call and (other is None or end_of_call.start() < other.start()):
                close = end_of_call
            is_inside = close is not None and other is not None and other.start() < close.start()
            outer = self._outer_end(text, other.end()) if other and is_inside and not self.ends_with_turn else None
            if close is None or (is_inside and outer is None):
                body_end = end = len(text) if other is None else other.start()
                is_closed = self.ends_with_turn
            else:
                body_end, end = (outer or close).span()
        if is_closed:
            calls = read_or_failed(lambda: self.read(text[start:body_end], schemas))
        else:
            calls = [malformed_call(MalformedCallError("is not closed: the end of a call is missing"))]
        parts.take(calls, text[begin.start() : end], is_closed=is_closed)
        return end


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelForm:
    """Answers of several messages, each with a header that names its channel or recipient (gpt-oss, Muse).

    Attributes:
        read: Parses the calls of a message, given the name of its recipient; None if calls stay in the text.
        marks: What every answer with headers contains.
    """

    read: Callable[[str, str, ArgumentSchemas], list[ToolCall]] | None
    marks: tuple[str, ...] = ("<|message|>", "<|channel|>")

    def answer(self, prompt: str | None, text: str, schemas: ArgumentSchemas) -> Answer:  # as every form
        """Parse an answer; the arguments are those of :meth:`MarkedForm.answer`."""
        parts = _Parts()
        position = 0
        for message in _MESSAGE.finditer(text):
            parts.content.append(text[position : message.start()])
            position = message.end()
            recipient, channel = _RECIPIENT.search(message["header"]), _CHANNEL.search(message["header"])
            name = recipient[1] if recipient else "user"
            if name == "self" or (channel and channel[1] == "analysis" and name == "user"):
                parts.reasoning.append(message["body"])
            elif name == "user":
                parts.content.append(message["body"])
            elif (read := self.read) is None:
                parts.content.append(message[0])
            else:
                name, body = name.removeprefix("functions."), message["body"]
                calls = read_or_failed(lambda read=read, name=name, body=body: read(name, body, schemas), name)
                parts.take(calls, message[0])
        is_header = text.startswith(("<|start|>", "<|channel|>"), position)  # of a message that was cut before its body
        if is_header and self.read is not None and (recipient := _RECIPIENT.search(text, position)):
            parts.take([malformed_call(MalformedCallError("ends before its arguments"), recipient[1])], "")
        parts.content.append("" if is_header else text[position:])
        return parts.answer()


Form = MarkedForm | ChannelForm

_MESSAGE = re.compile(
    r"(?:\A|<\|start\|>)(?P<header>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>"
    r"(?P<body>.*?)(?:<\|(?:end|call|return|eom|eot)\|>|(?=<\|start\|>)|$)",
    re.DOTALL,
)
# The beginning of a call with tagged arguments, after its opening marker.
_BEGIN = re.compile(r"\s*(?:<function=|<invoke |<\uff5cDSML\uff5cinvoke |[\w./-]+\s*<arg_key>)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


ReadString = Callable[[str, int], tuple[str, int]]
"""(text, index of an opening quote) → the string, and the index after it."""


def python_calls(text: str, read_string: ReadString) -> list[ToolCall]:
    """Parse calls written as a Python list, ``[look(at='door', times=2), wait()]``, each separately.

    A malformed call does not affect later calls: parsing resumes at the next call.

    >>> [(call.name, call.arguments) for call in python_calls("[look(at='Bob's', times=2), wait()]", bare_string)]
    [('look', {'at': "Bob's", 'times': 2}), ('wait', {})]
    """
    inner = text.strip()
    inner = inner[1:-1] if inner.startswith("[") and inner.endswith("]") else inner
    calls: list[ToolCall] = []
    position = skip_space(inner, 0)
    while position < len(inner) and len(calls) <= MAX_CALLS:
        name = _CALL_HEAD.match(inner, position)
        try:
            arguments, position = _arguments(inner, position, name, read_string)
            calls.append(tool_call(name[1] if name else "", arguments))
            separator = _BETWEEN_CALLS.match(inner, position)
            position = separator.end() if separator else len(inner)
        except MalformedCallError as error:
            calls.append(malformed_call(error, name[1] if name else ""))
            later = _LATER_CALL.search(inner, position if error.position is None else error.position)
            position = len(inner) if later is None else later.end()
    return calls


def bare_string(text: str, start: int) -> tuple[str, int]:
    """Parse a string without escapes: it ends at a quote that is followed by the end of the argument or of the call."""
    quote = text[start]
    end = re.compile(quote + _AFTER_STRING).search(text, start + 1)
    if end is None:
        raise MalformedCallError("has a string that is not closed")
    value = text[start + 1 : end.start()]
    head = _LATER_CALL.search(value)  # another call, whose string this quote closes
    if head is not None and re.compile(r"\w\s*=\s*" + quote).search(value, head.end()) is not None:
        raise MalformedCallError("has a string that is not closed before the next call")
    return value, end.start() + 1


def escaped_string(text: str, start: int) -> tuple[str, int]:
    r"""Parse a string with the escapes of Python.

    >>> escaped_string(r"'it\'s\nfine', 2", 0)
    ("it's\nfine", 13)
    """
    found = _ESCAPED_STRING.match(text, start)
    if found is None:
        raise MalformedCallError("has a string that is not closed")
    value = _ESCAPE.sub(
        lambda one: chr(int(one["code"][1:], 16)) if one["code"] else _ESCAPES.get(one["letter"], one[0]),
        found[0][1:-1],
    )
    if not value.isascii() and _HALF_PAIR.search(value):
        raise MalformedCallError("has a string that contains half of a surrogate pair")
    return value, found.end()


def _arguments(
    text: str, position: int, name: re.Match[str] | None, read_string: ReadString
) -> tuple[dict[str, Any], int]:
    """Parse arguments up to the closing parenthesis; return them and the index after it."""
    if name is None:
        raise MalformedCallError("must be written as name(argument=value)")
    arguments: dict[str, Any] = {}
    position = skip_space(text, name.end())
    while not text.startswith(")", position):
        try:
            position = _argument(text, position, arguments, read_string)
        except MalformedCallError as error:
            error.position = len(text[:position].rstrip(", \t\n"))  # the next call may begin after the last comma
            raise
    return arguments, position + 1


def _argument(text: str, start: int, arguments: dict[str, Any], read_string: ReadString) -> int:
    """Parse one argument into ``arguments``; return the index after it and its comma."""
    key = _KEY.match(text, start)
    if key is None:
        raise MalformedCallError("gives an argument without its name: write name(argument=value)")
    if key[1] in arguments:
        raise MalformedCallError(f"gives {key[1]!r} twice")
    arguments[key[1]], position = _value(text, key.end(), read_string)
    separator = _SEPARATOR.match(text, position)
    if separator is None:
        raise MalformedCallError(f"has no ',' or ')' after its argument {key[1]!r}")
    return separator.end()


def _value(text: str, start: int, read_string: ReadString) -> tuple[Any, int]:
    first = text[start : start + 1]
    if first in {"'", '"'}:
        return read_string(text, start)
    if first in {"[", "{"}:
        try:
            return read_json(text, start)
        except MalformedCallError as error:
            bare, depth = _STRING_OR_REST.sub(lambda one: " " * len(one[0]), text[start:]), 0
            for bracket in _BRACKET.finditer(bare):  # it may be a Python literal
                depth += 1 if bracket[0] in "[{" else -1
                if depth == 0:
                    return literal(text[start : start + bracket.end()], error), start + bracket.end()
            raise
    word = _WORD.match(text, start)
    written = word[0].strip() if word else ""
    return (WORDS[written] if written in WORDS else whole_json(written)), start + len(word[0] if word else "")


_CALL_HEAD = re.compile(r"\s*([\w./-]+)\(")
_LATER_CALL = re.compile(r",\s*(?=[\w./-]+\(\s*(?:\)|\w+\s*=))")
_BETWEEN_CALLS = re.compile(r"\s*,?\s*")
_KEY = re.compile(r"\s*(\w+)\s*=\s*")
_SEPARATOR = re.compile(r"\s*,\s*|\s*(?=\))")
_AFTER_STRING = r"(?=\s*(?:,\s*\w+\s*=|\)\s*(?:,\s*[\w./-]+\(|\]?\s*$)))"
_ESCAPED_STRING = re.compile(r"'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"", re.DOTALL)
_STRING_OR_REST = re.compile(r"'(?:[^'\\]|\\.)*+(?:'|\Z)|\"(?:[^\"\\]|\\.)*+(?:\"|\Z)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:(?P<code>x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})|(?P<letter>.))", re.DOTALL)
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_HALF_PAIR = re.compile(r"[\ud800-\udfff]")
_WORD = re.compile(r"[^,)]*")
_BRACKET = re.compile(r"[\[\]{}]")
