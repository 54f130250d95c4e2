"""Determine how a tokenizer's chat template renders calls, by rendering one, and parse those of an answer."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakKeyDictionary

from agentsgym.errors import ConfigError
from agentsgym.interruptions import is_interruption
from agentsgym.texts import sentence_of, shown
from agentsgym.tokens.calls.families import FORMS, HERMES, json_form
from agentsgym.tokens.calls.forms import Answer, ChannelForm, Form, read_or_failed
from agentsgym.tokens.calls.values import (
    ArgumentSchemas,
    MalformedCallError,
    argument_schemas,
    malformed_call,
    read_json,
    tool_call,
)
from agentsgym.types import Action, ToolCall

if TYPE_CHECKING:
    from agentsgym.tokens.chat_format import ChatFormat


_NAME: Final = "look_up"
_NAMED_ID: Final = f"functions.{_NAME}:0"  # some templates render the name of a call only as part of its id
_ARGUMENTS: Final[dict[str, Any]] = {"city": "Paris", "days": 3}
_HARD_ARGUMENTS: Final[dict[str, Any]] = {"city": "it's\n\\fine", "days": 3}  # some templates escape these characters
_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "days": {"type": "integer", "description": "When."},
            },
            "required": ["city", "days"],
        },
    },
}
_QUESTION: Final = {"role": "user", "content": "question"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateForm:
    """Calls in the format that the tokenizer's ``response_template`` describes.

    Attributes:
        tokenizer: The tokenizer.
        opens: The opening marker of a call; None if the template defines none.
    """

    tokenizer: Any
    opens: re.Pattern[str] | None

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


class CallReader:
    """Parses answers for one tokenizer, chat template and set of template options.

    Attributes:
        form: The template's format of calls; None if it renders none that can be parsed.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._prompt = ""
        self.form: Form | TemplateForm | None = None
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= {*tokenizer.all_special_tokens}
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        if tokenizer.chat_template:
            self._prompt = _generation_prompt(tokenizer, options)
            self.form = _form_of(tokenizer, options)

    def check_reads_calls(self) -> None:
        """Check that calls can be parsed in the format of the template."""
        if self.form is not None or not self._tokenizer.chat_template:
            return
        _, turn = next(_written_calls(self._tokenizer, self._options), ("", ""))
        name = self._tokenizer.name_or_path or type(self._tokenizer).__name__
        raise ConfigError(
            f"the chat template of {name!r} prints calls that cannot be read back: {shown(turn, 200)}; set "
            "tokenizer.response_template so that it describes the calls, or use a chat template that renders calls in "
            "a supported format"
        )

    def read(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]], stopped_by: str | None = None
    ) -> Answer | None:
        """Parse sampled ids; None if they contain no calls, reasoning or other parts.

        Args:
            token_ids: The answer, (T,).
            tools: The JSON schemas of the tools, which define the types of arguments.
            stopped_by: The text that ended the answer, and is left out; None if no text did.
        """
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if stopped_by is not None and stopped_by in text:
            text = text[: text.rindex(stopped_by)]
        return self.read_text(text, tools, prompt=self._prompt)

    def read_text(self, text: str, tools: Sequence[Mapping[str, Any]], *, prompt: str | None = None) -> Answer | None:
        """Parse an answer given as text, with its control tokens if it was sampled.

        Args:
            text: The answer.
            tools: The JSON schemas of the tools.
            prompt: The generation prompt; None if it is unknown, so that reasoning may have begun in it.
        """
        if self.form is None:
            return None
        answer = self.form.answer(prompt, text, argument_schemas(tools))
        has_parts = isinstance(self.form, ChannelForm) and "<|message|>" in text
        if not answer.calls and answer.reasoning is None and not has_parts:
            return None
        content = self._special.sub("", answer.content).strip()
        reasoning = answer.reasoning and self._special.sub("", answer.reasoning).strip()
        return Answer(content=content, reasoning=reasoning, calls=answer.calls)


def reader_of(chat_format: ChatFormat) -> CallReader:
    """Get the reader of a format, created on the first call and again whenever the template changes."""
    tokenizer: Any = chat_format.tokenizer
    options: Mapping[str, Any] = getattr(chat_format, "template_options", None) or {}
    readers = _READERS.setdefault(tokenizer, {})
    key = str(tokenizer.chat_template), repr(sorted(options.items()))
    reader = readers.get(key)
    if reader is None:
        reader = readers[key] = CallReader(tokenizer, options)
    return reader


_READERS: WeakKeyDictionary[Any, dict[tuple[str, str], CallReader]] = WeakKeyDictionary()


def _form_of(tokenizer: Any, options: Mapping[str, Any]) -> Form | TemplateForm | None:
    """Find the form that parses a call as it was rendered, and leaves the least other text."""
    reply = _rendered(tokenizer, options, [_QUESTION, {"role": "assistant", "content": "reply"}], add_prompt=False)
    end = reply.rpartition("reply")[2].strip()
    described: list[TemplateForm] = []
    given: Any = getattr(tokenizer, "response_template", None)
    if isinstance(given, dict):
        field: Any = cast("Any", given).get("fields", {}).get("tool_calls", {})
        opens = field.get("open_pattern") or (re.escape(field["open"]) if isinstance(field.get("open"), str) else None)
        described.append(TemplateForm(tokenizer=tokenizer, opens=re.compile(opens) if opens else None))
    for prompt, turn in _written_calls(tokenizer, options):
        forms = (*FORMS.values(), *described, *_learned_form(turn, end))
        read = [(_rest_of(form, prompt, turn, _ARGUMENTS), form) for form in forms]
        rests = [rest for rest, _ in read if rest is not None]
        if not rests:
            continue
        best = [form for rest, form in read if rest == min(rests)]
        # Of several that read a simple call, one that reads quotes and backslashes too, or the first.
        for hard_prompt, hard_turn in _written_calls(tokenizer, options, _HARD_ARGUMENTS) if len(best) > 1 else ():
            for form in best:
                if _rest_of(form, hard_prompt, hard_turn, _HARD_ARGUMENTS) is not None:
                    return form
        return best[0]
    return None


def _rest_of(form: Form | TemplateForm, prompt: str, turn: str, arguments: Mapping[str, Any]) -> int | None:
    """How much text a form leaves beside the one call of a turn; None if it reads a different call."""
    answer = form.answer(prompt, turn, argument_schemas([_TOOL]))
    calls = [(call.name, call.arguments, call.error) for call in answer.calls]
    return len(answer.content) if calls == [(_NAME, arguments, None)] else None


def _learned_form(turn: str, turn_end: str) -> Iterator[Form]:
    """The form of a template that writes calls as JSON objects between its own markers."""
    position = turn.find("{")
    while position >= 0:
        try:
            value, end = read_json(turn, position)
        except MalformedCallError:
            value, end = None, position
        if isinstance(value, dict) and _NAME in value.values() and _ARGUMENTS in value.values():
            before, after = turn[:position].rstrip("[ \n").rpartition("</think>")[2].strip(), turn[end:].lstrip("] \n")
            if before:
                yield json_form(before.splitlines()[-1], after.strip().removesuffix(turn_end).strip())
            return
        position = turn.find("{", position + 1)


def _written_calls(
    tokenizer: Any, options: Mapping[str, Any], arguments: Mapping[str, Any] = _ARGUMENTS
) -> Iterator[tuple[str, str]]:
    """Write a turn that calls a tool in each way that templates accept; yields what precedes it and the turn."""
    ways = itertools.product(("", "Let me see."), (arguments, json.dumps(arguments)), ("abcdefghi", _NAMED_ID))
    for content, given, call_id in ways:
        call = {"type": "function", "id": call_id, "function": {"name": _NAME, "arguments": given}}
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        whole = _rendered(tokenizer, options, [_QUESTION, answer], add_prompt=False)
        for add_prompt in (True, False):
            before = _rendered(tokenizer, options, [_QUESTION], add_prompt=add_prompt)
            if before and whole.startswith(before):
                yield (_generation_prompt(tokenizer, options) if add_prompt else ""), whole[len(before) :]


def _generation_prompt(tokenizer: Any, options: Mapping[str, Any]) -> str:
    prompted, bare = (_rendered(tokenizer, options, [_QUESTION], add_prompt=add_prompt) for add_prompt in (True, False))
    return prompted.removeprefix(bare)


def _rendered(tokenizer: Any, options: Mapping[str, Any], messages: list[Any], *, add_prompt: bool) -> str:
    """Render with a tool; empty if the template raises."""
    try:
        return tokenizer.apply_chat_template(
            messages, tools=[_TOOL], tokenize=False, add_generation_prompt=add_prompt, **options
        )
    except BaseException as error:  # templates may raise anything
        if is_interruption(error):
            raise
        return ""


def with_calls(
    action: Action, chat_format: ChatFormat | None, tools: Sequence[Mapping[str, Any]], stopped_by: str | None = None
) -> Action:
    """Parse the calls, reasoning and text of an action without parsed calls; never raises.

    Sampled ids are parsed in the format of the chat template, which is determined once by rendering a call and parsing
    it. A text answer may also use ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, the only format if there is
    no template or it does not render calls. Calls inside reasoning are ignored; in text, everything before a first
    ``</think>`` without a ``<think>`` is reasoning that began in the prompt. An answer that was truncated at the token
    budget is not parsed, since a truncated call may look complete.

    A malformed call becomes a :class:`~agentsgym.types.ToolCall` with an ``error`` and stays in the text; the other
    calls are parsed. Arguments that a format writes as bare text get the types of the tool's schema; they are not
    validated here.

    Args:
        action: The agent's action.
        chat_format: The chat format of the tokenizer; None if there is only text.
        tools: The JSON schemas of the tools.
        stopped_by: The text that ended the answer and is only in its ids; None if no text did.
    """
    if action.tool_calls or action.finish_reason == "length":
        return action
    reader = None if chat_format is None else reader_of(chat_format)
    if reader is None or reader.form is None:
        answer = _of_text(action.text)
    elif action.token_ids is not None:
        answer = reader.read(action.token_ids, tools, stopped_by)
    else:
        # Choose the format with more well-formed calls, that of the template if they are equal.
        answer = reader.read_text(action.text, tools)
        num_good = 0 if answer is None else _num_good(answer)
        # Exclude the template's reasoning, unless calls were found in the template's format.
        other = _of_text(action.text if answer is None or num_good else answer.content)
        if answer is None:
            answer = other
        elif other is not None and _num_good(other) > num_good:
            answer = dataclasses.replace(other, reasoning=other.reasoning or answer.reasoning)
    if answer is None:
        return action
    return dataclasses.replace(
        action, text=answer.content.strip(), reasoning=answer.reasoning or action.reasoning, tool_calls=answer.calls
    )


def _of_text(text: str) -> Answer | None:
    answer = HERMES.answer(None, text, {})
    return answer if answer.calls else None


def _num_good(answer: Answer) -> int:
    return sum(call.error is None for call in answer.calls)
