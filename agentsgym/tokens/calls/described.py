"""Parse an answer as a tokenizer's own ``response_template`` describes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from agentsgym.errors import ConfigError
from agentsgym.interruptions import is_interruption
from agentsgym.texts import sentence_of
from agentsgym.tokens.calls.forms import Answer, read_or_failed
from agentsgym.tokens.calls.thoughts import ThoughtMarkers
from agentsgym.tokens.calls.values import ArgumentSchemas, MalformedCallError, malformed_call, tool_call
from agentsgym.types import ToolCall

_THOUGHTS: Final = ("reasoning_content", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateForm:
    """Calls in the format that the tokenizer's ``response_template`` describes.

    Attributes:
        tokenizer: The tokenizer.
        opens: The opening marker of a call; None if the template defines none.
        has_thoughts: Whether the template describes reasoning.
        thinks: The markers of reasoning; None if the template describes them by regular expressions.
        marks: What every answer with reasoning contains: nothing that is known.
    """

    tokenizer: Any
    opens: re.Pattern[str] | None
    has_thoughts: bool = False
    thinks: ThoughtMarkers | None = None
    marks: tuple[str, ...] = ("",)

    def answer(self, prompt: str | None, text: str, schemas: ArgumentSchemas) -> Answer:
        """Read an answer; arguments as in :meth:`agentsgym.tokens.calls.forms.MarkedForm.answer`."""
        if prompt is None:
            thought, ends, rest = text.partition("</think>")
            if ends and "<think>" not in thought:
                answer = self.answer("", rest, schemas)
                return Answer(content=answer.content, reasoning=thought.strip(), calls=answer.calls)
            prompt = ""
        try:
            return self._parsed(prompt, text, schemas)
        except BaseException as error:  # the parser runs code from the tokenizer, which may raise anything
            if is_interruption(error):
                raise
            starts = [match.start() for match in self.opens.finditer(text)] if self.opens else []
            if len(starts) < 2:
                failed = malformed_call(MalformedCallError(f"is malformed: {sentence_of(error)}"))
                return Answer(content=text, calls=(failed,))
        # Parse each call separately, so that a malformed one does not affect the others.
        first = self.answer(prompt, text[: starts[1]], schemas)
        rest = [self.answer("", text[a:b], schemas) for a, b in zip(starts[1:], [*starts[2:], len(text)], strict=True)]
        return Answer(
            content="".join(answer.content for answer in (first, *rest)),
            reasoning=first.reasoning,
            calls=tuple(call for answer in (first, *rest) for call in answer.calls),
        )

    def _parsed(self, prompt: str, text: str, schemas: ArgumentSchemas) -> Answer:
        tools = [
            {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}
            for name, properties in schemas.items()
        ]
        message: Any = self.tokenizer.parse_response(text, prefix=prompt, tools=tools)
        calls: list[ToolCall] = []
        for call in message.get("tool_calls") or ():
            function: Any = call["function"]
            calls += read_or_failed(
                lambda call=call, given=function: [tool_call(given.get("name"), given.get("arguments"), call.get("id"))]
            )
        failed = any(call.error is not None for call in calls)
        reasoning = message.get("reasoning_content") or message.get("thinking")
        content = text if failed else message.get("content") or ""
        return Answer(content=content, reasoning=reasoning, calls=tuple(calls))


def described_form(tokenizer: Any) -> TemplateForm | None:
    """The form of a tokenizer's own ``response_template``; None if it has none.

    Raises:
        ConfigError: A pattern of the template is not a regular expression.
    """
    given: Any = getattr(tokenizer, "response_template", None)
    if not isinstance(given, dict):
        return None
    fields: Mapping[str, Any] = cast("Any", given).get("fields", {})
    thought = next((fields[name] for name in _THOUGHTS if name in fields), None)
    opens, closes = (None if thought is None else _literal(thought, end) for end in ("open", "close"))
    return TemplateForm(
        tokenizer=tokenizer,
        opens=_pattern(fields.get("tool_calls", {}), "open"),
        has_thoughts=thought is not None,
        thinks=ThoughtMarkers(opens, closes) if opens and closes else None,
    )


def _pattern(field: Mapping[str, Any], end: str) -> re.Pattern[str] | None:
    """The pattern of one end of a field; None if the field has none."""
    text, pattern = field.get(end), field.get(f"{end}_pattern")
    if not pattern and isinstance(text, str):
        pattern = re.escape(text)
    try:
        return re.compile(str(pattern)) if pattern else None
    except re.error as error:
        raise ConfigError(
            f"{end}_pattern of a field in tokenizer.response_template must be a regular expression: {error}"
        ) from error


def _literal(field: Mapping[str, Any], end: str) -> str | None:
    """The text of one end of a field; None if it is a regular expression."""
    if isinstance(field.get(end), str):
        return field[end]
    pattern = _pattern(field, end)
    text = "" if pattern is None else re.sub(r"\\(\W)", r"\1", pattern.pattern.removesuffix(r"\s*"))
    return text if pattern is not None and pattern.fullmatch(text) else None
