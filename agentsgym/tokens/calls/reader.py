"""Determine how a tokenizer's chat template renders calls, by rendering one, and parse those of an answer."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Final, Protocol, cast
from weakref import WeakKeyDictionary

from agentsgym.errors import ConfigError
from agentsgym.interruptions import is_interruption
from agentsgym.texts import shown
from agentsgym.tokens.calls.described import TemplateForm, described_form
from agentsgym.tokens.calls.families import FORMS, HERMES, json_form
from agentsgym.tokens.calls.forms import DATA, NEVER, Answer, ChannelForm, Form, MarkedForm
from agentsgym.tokens.calls.quotes import without_quotes
from agentsgym.tokens.calls.repairs import with_repairs
from agentsgym.tokens.calls.thoughts import THINK, ThoughtMarkers, thought_markers
from agentsgym.tokens.calls.values import ArgumentSchemas, MalformedCallError, argument_schemas, read_json
from agentsgym.tokens.tool_messages import as_written, native_form
from agentsgym.types import Action, Message, ToolCall

_NAME: Final = "look_up"
_NAMED_ID: Final = f"functions.{_NAME}:0"  # some templates render the name of a call only as part of its id
_ARGUMENTS: Final[dict[str, Any]] = {"city": "Paris", "days": 3}
_HARD_ARGUMENTS: Final[dict[str, Any]] = {"city": "\nit's\n\\fine\n", "days": 3}  # characters that templates escape
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
_MARK_LETTERS: Final = frozenset("<[\u25c1\uff5c")
SPELLED: Final = "\ufdd0"
"""A character that no text contains, inside markers that an answer spells with other tokens."""


class Format(Protocol):
    """What reading needs of a :class:`~agentsgym.tokens.chat_format.ChatFormat`, which itself needs a reader."""

    tokenizer: Any
    stop_token_ids: frozenset[int]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids without control tokens."""
        ...


class AnswerReader:
    """Parses answers for one tokenizer, chat template and set of template options.

    Attributes:
        is_begun: Whether the generation prompt begins reasoning.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self._tokenizer, self._options = tokenizer, options
        added: dict[int, Any] = tokenizer.added_tokens_decoder if tokenizer is not None else {}
        special = {token.content for token in added.values() if token.special}
        self._special = _any_of(special | {*getattr(tokenizer, "all_special_tokens", ())})
        ids = {token.content: key for key, token in added.items() if not _MARK_LETTERS.isdisjoint(token.content)}
        self._added, self._added_ids = _any_of(ids), frozenset(ids.values())
        self._native = None if tokenizer is None else native_form(tokenizer)
        self._prompt, template = "", str((tokenizer is not None and tokenizer.chat_template) or "")
        self._has_response = "<response>" in template
        self._markers: ThoughtMarkers | None = None
        if template:
            self._prompt = _generation_prompt(tokenizer, options)
            self._markers = thought_markers(template, partial(_rendered, tokenizer, options, add_prompt=False))
        described = described_form(tokenizer) if self._markers is None else None
        thinks = self._markers or (described and described.thinks)
        self._own: dict[str, Any] = {"thinks": thinks} if thinks else {"thinks_first": True}
        self._thoughts: Form | TemplateForm = MarkedForm(opens=NEVER, closes=NEVER, read=_no_calls, **self._own)
        if "<|message|>" in template:
            self._thoughts = ChannelForm(read=None)
        elif thinks is None and described is not None and described.has_thoughts:
            self._thoughts = described
        self._mark = _any_of(map(str.strip, self._thoughts.marks))
        self._mark_ids = {token_id for text, token_id in ids.items() if text in "".join(self._thoughts.marks)}
        self.is_begun = isinstance(self._thoughts, MarkedForm) and self._thoughts.is_begun_in(self._prompt)

    @property
    def prints_thoughts(self) -> bool:
        """Whether the template prints the reasoning of a last answer."""
        return not isinstance(self._thoughts, MarkedForm) or bool(self._thoughts.thinks.after)

    @property
    def has_thoughts(self) -> bool:
        """Whether the template prints or marks reasoning."""
        return self._markers is not None or not isinstance(self._thoughts, MarkedForm)

    @cached_property
    def form(self) -> Form | TemplateForm | None:
        """The template's format of calls; None if it renders none that can be parsed."""
        if self._tokenizer is None or not self._tokenizer.chat_template:
            return None
        form = _form_of(self._tokenizer, self._options)
        if not isinstance(form, MarkedForm):
            return form
        is_thought = self._markers is not None and form.opens.match(self._markers.opens)
        return None if is_thought else dataclasses.replace(form, **self._own)

    @cached_property
    def calls(self) -> Form | TemplateForm:
        """The format in which calls are parsed: that of the template, the model's own, or JSON between tags."""
        form = self.form
        if form is None and self._native is not None:
            opens, closes, is_python = self._native
            own = FORMS["lfm, escaped"] if is_python else json_form(opens, closes, ends_with_turn=not closes)
            form = dataclasses.replace(cast("MarkedForm", own), **self._own)
        return form or dataclasses.replace(HERMES, **self._own)

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

    @cached_property
    def example(self) -> str:
        """A call as the template renders it, or in the model's own form."""
        if self.form is None and self._native is not None:
            return self._native.write([{"function": {"name": _NAME, "arguments": _ARGUMENTS}}])
        if self.form is None:
            return f'<tool_call>{{"name": "{_NAME}", "arguments": {json.dumps(_ARGUMENTS)}}}</tool_call>'
        turns = _written_calls(self._tokenizer, self._options)
        read = (turn for prompt, turn in turns if _rest_of(self.form, prompt, turn, _ARGUMENTS) is not None)
        written = next(read, "")
        if isinstance(form := self.form, MarkedForm):
            begins = [found.start() for one in (form.opens, form.wraps) if one and (found := one.search(written))]
            written = written[min(begins, default=0) :]
        return written.strip().removesuffix(_end_of_turn(self._tokenizer, self._options)).strip()

    @cached_property
    def _call_marks(self) -> tuple[re.Pattern[str], frozenset[int]]:
        """The added tokens that only calls contain, and their ids."""
        if self._tokenizer is None:
            return NEVER, frozenset()
        plain = {*self._added.findall(_end_of_turn(self._tokenizer, self._options)), *self._thoughts.marks, "<|start|>"}
        marks = {*self._added.findall(self.example)} - plain
        return _any_of(marks), frozenset(map(self._tokenizer.convert_tokens_to_ids, marks))

    def is_marked(self, text: str, token_ids: Sequence[int]) -> bool:
        """Whether sampled text contains a token that only calls contain, and does not quote it, or ends with one."""
        marks, ids = self._call_marks
        found = marks.search(text) if token_ids else None
        if found is None or text.lstrip().startswith(DATA) or text.count("`", 0, found.start()) % 2:
            return bool(token_ids) and token_ids[-1] in ids
        return True

    def with_example(self, call: ToolCall) -> ToolCall:
        """Show the expected form in the error of a malformed call."""
        if call.error is None:
            return call
        return dataclasses.replace(call, error=f"{call.error}; a call looks like this: {self.example}")

    @cached_property
    def prints_thoughts_beside_calls(self) -> bool:
        """Whether the template prints the reasoning of an answer with calls, as some do only there."""
        turns = _written_calls(self._tokenizer, self._options, reasoning_content="thinkable", thinking="thinkable")
        return any("thinkable" in turn for _, turn in turns)

    @property
    def around_thought(self) -> tuple[str, str]:
        """What stands around reasoning, after the generation prompt, where the template does not print it."""
        begins, ends, _ = self._own.get("thinks", THINK)
        return "" if self.is_begun else f"{begins}\n", f"\n{ends}\n\n"

    @property
    def end_mark(self) -> str:
        """The closing marker of reasoning."""
        return self._own.get("thinks", THINK).closes

    def with_thought(self, message: Message) -> Message:
        """Move reasoning into the text of an answer, for a template that omits it."""
        if "written" in message:
            return as_written(message)
        before, after = self.around_thought
        rest = {key: value for key, value in message.items() if key != "reasoning_content"}
        text = f"{before}{message.get('reasoning_content')}{after}{message['content']}"
        return cast("Message", {**rest, "content": text})

    def may_think(self, action: Action) -> bool:
        """Whether an answer may hold reasoning, by its ids and its text, without decoding it."""
        ids, marks = action.token_ids, self._mark_ids
        if ids is not None and (self.is_begun or (marks and not marks.isdisjoint(ids))):
            return True
        return self._mark.search(action.text) is not None

    def end_of_thought(self, token_ids: Sequence[int], *, has_tools: bool) -> str:
        """What the template prints between reasoning and text, for an answer that ends inside reasoning; else empty."""
        form = self._cut if has_tools else self._thoughts
        if not isinstance(form, MarkedForm) or not form.answer(self._prompt, self.decode(token_ids), {}).is_open:
            return ""
        return form.thinks.after or form.thinks.closes

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode an answer with its markers; in those that other tokens spell, ``SPELLED`` follows the first letter."""
        text = self._decoded(token_ids)
        if len(self._added.findall(text)) == sum(token_id in self._added_ids for token_id in token_ids):
            return text
        parts = itertools.groupby(token_ids, key=self._added_ids.__contains__)
        pieces = [(is_added, self._decoded([*ids])) for is_added, ids in parts]
        return "".join(
            piece if is_added else self._added.sub(lambda found: _spelled(found[0]), piece)
            for is_added, piece in pieces
        )

    def without_controls(self, text: str) -> str:
        """Remove special tokens from a decoded answer."""
        return self._special.sub("", text).strip()

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode([*token_ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @cached_property
    def _cut(self) -> Form | TemplateForm:
        """The format of truncated answers, whose calls remain in the text and may quote the markers of reasoning."""
        form = self.calls
        return dataclasses.replace(form, read=_unread) if isinstance(form, MarkedForm) else self._thoughts

    def read(
        self,
        text: str,
        tools: Sequence[Mapping[str, Any]] | None,
        token_ids: Sequence[int] | None = None,
        *,
        is_cut: bool = False,
    ) -> Answer | None:
        """Parse an answer; None if it contains no calls, reasoning or other parts.

        Args:
            text: The answer, with its control tokens if it was sampled.
            tools: The JSON schemas of the tools, which define the types of arguments; None to parse no calls.
            token_ids: Its ids if it was sampled after the generation prompt; None if reasoning may have begun before.
            is_cut: Whether calls remain in the text, since the answer is truncated.
        """
        form = self._cut if is_cut else self._thoughts if tools is None else self.calls
        if isinstance(form, MarkedForm) and not self.has_thoughts and text.lstrip().startswith(THINK.opens):
            form = dataclasses.replace(form, thinks=THINK)
        answer = form.answer(None if token_ids is None else self._prompt, text, argument_schemas(tools or ()))
        if is_cut and isinstance(form, MarkedForm):
            answer = dataclasses.replace(answer, calls=())
        if tools is None and answer.calls:
            return None  # of a tokenizer's own format, which parses calls in any case
        has_parts = isinstance(form, ChannelForm) and any(mark in text for mark in form.marks)
        if not answer.calls and answer.reasoning is None and not has_parts:
            return None
        content, *failed = map(self.without_controls, (answer.content, *answer.failed))
        if self._has_response:  # Granite 3.3
            content = content.removeprefix("<response>").removesuffix("</response>").strip()
        reasoning = answer.reasoning and self.without_controls(answer.reasoning)
        open_thought = answer.reasoning if answer.is_open else None
        answer = dataclasses.replace(
            answer,
            content=content,
            reasoning=reasoning,
            open_thought=open_thought,
            failed=(*failed,),
            is_marked=tools is not None and self.is_marked(answer.content, token_ids or ()),
        )
        return _unspelled(answer) if SPELLED in text else answer

    def unquoted(self, text: str) -> str:
        """Mark the openings of calls that an answer without ids quotes as spelled."""
        forms = [self.calls] if isinstance(self.calls, MarkedForm) and not self.calls.ends_with_turn else []
        opens, closes = (
            "|".join(dict.fromkeys(getattr(one, end).pattern for one in (*forms, HERMES)))
            for end in ("opens", "closes")
        )
        return without_quotes(text, opens, closes, _spelled)

    def better(self, answer: Answer | None, text: str) -> Answer | None:
        """Return an answer in text, or how it reads with calls as JSON if that has more well-formed ones."""
        num_good = 0 if answer is None else _num_good(answer)
        # Exclude the template's reasoning, unless calls were found in the template's format.
        other = HERMES.answer(None, text if answer is None or num_good else answer.content, {})
        if not other.calls or (answer is not None and _num_good(other) <= num_good):
            return answer
        reasoning = other.reasoning or (None if answer is None else answer.reasoning)
        return Answer(content=other.content, reasoning=reasoning, calls=other.calls)


def reader_of(chat_format: Format | None) -> AnswerReader:
    """Get the reader of a format (None: of text), created on the first call and again whenever the template changes."""
    if chat_format is None:
        return _OF_TEXT
    tokenizer: Any = chat_format.tokenizer
    options: Mapping[str, Any] = getattr(chat_format, "template_options", None) or {}
    readers = _READERS.setdefault(tokenizer, {})
    key = str(tokenizer.chat_template), repr(sorted(options.items()))
    reader = readers.get(key)
    if reader is None:
        reader = readers[key] = AnswerReader(tokenizer, options)
    return reader


_READERS: WeakKeyDictionary[Any, dict[tuple[str, str], AnswerReader]] = WeakKeyDictionary()


def _form_of(tokenizer: Any, options: Mapping[str, Any]) -> Form | TemplateForm | None:
    """Find the form that parses a call as it was rendered, and leaves the least other text."""
    end = _end_of_turn(tokenizer, options)
    described = described_form(tokenizer)
    for prompt, turn in _written_calls(tokenizer, options):
        forms = (*FORMS.values(), *filter(None, [described]), *_learned_form(turn, end))
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
    tokenizer: Any, options: Mapping[str, Any], arguments: Mapping[str, Any] = _ARGUMENTS, **thought: str
) -> Iterator[tuple[str, str]]:
    """Write a turn that calls a tool in each way that templates accept; yields what precedes it and the turn."""
    ways = itertools.product(("", "Let me see."), (arguments, json.dumps(arguments)), ("abcdefghi", _NAMED_ID))
    for content, given, call_id in ways:
        call = {"type": "function", "id": call_id, "function": {"name": _NAME, "arguments": given}}
        answer = {"role": "assistant", "content": content, "tool_calls": [call], **thought}
        whole = _rendered(tokenizer, options, [_QUESTION, answer], add_prompt=False)
        befores = [_rendered(tokenizer, options, [_QUESTION], add_prompt=add_prompt) for add_prompt in (True, False)]
        for before, prompt in zip(befores, (_generation_prompt(tokenizer, options), ""), strict=True):
            if before and whole.startswith(before):
                yield prompt, whole[len(before) :]
        if whole and not any(map(whole.startswith, befores)):  # the prompt is not part of a history
            yield "", whole.rpartition(_QUESTION["content"])[2]


def _end_of_turn(tokenizer: Any, options: Mapping[str, Any]) -> str:
    reply = _rendered(tokenizer, options, [_QUESTION, {"role": "assistant", "content": "reply"}], add_prompt=False)
    return reply.rpartition("reply")[2].strip()


def _generation_prompt(tokenizer: Any, options: Mapping[str, Any]) -> str:
    prompted, bare = (_rendered(tokenizer, options, [_QUESTION], add_prompt=add_prompt) for add_prompt in (True, False))
    return prompted.removeprefix(bare)


def _rendered(tokenizer: Any, options: Mapping[str, Any], messages: Sequence[Any], *, add_prompt: bool) -> str:
    """Render with a tool; empty if the template raises."""
    try:
        return tokenizer.apply_chat_template(
            messages, tools=[_TOOL], tokenize=False, add_generation_prompt=add_prompt, **options
        )
    except BaseException as error:  # templates may raise anything
        if is_interruption(error):
            raise
        return ""


def read_answer(
    action: Action,
    chat_format: Format | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    stopped_by: str | None = None,
    *,
    is_strict: bool = False,
) -> Action:
    """Split an answer into reasoning, text and calls; no answer makes it raise.

    Reasoning ends at its first closing marker, and reasoning that is not closed is the whole answer. Sampled ids are
    parsed in the format of the chat template, which is determined once by rendering reasoning and a call and parsing
    them; where a marker is one token of the vocabulary, only that token is the marker. Under a template without
    reasoning, ``<think>…</think>`` at the start of an answer is reasoning. In text, everything before a first
    ``</think>`` without a ``<think>`` is reasoning that began in the prompt, and a call may also be written as
    ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, the only format without a template, or with one that
    renders no calls if the model has no native form. Calls inside reasoning are ignored, and so are those of an answer
    that was truncated at the token budget, since a truncated call may look complete.

    A malformed call becomes a :class:`~agentsgym.types.ToolCall` with an ``error`` and stays in the text; the other
    calls are parsed. Arguments that a format writes as bare text get the types of the tool's schema; they are not
    validated here. Reasoning that the agent gave separately comes before reasoning in its text.

    Args:
        action: The agent's action; calls that it brings are kept.
        chat_format: The chat format of the tokenizer; None if there is only text.
        tools: The JSON schemas of the tools; None to parse no calls.
        stopped_by: The text that ended the answer and is only in its ids; None if no text did.
        is_strict: Whether a call that is not in the format of the template is malformed, rather than repaired: see
            :mod:`agentsgym.tokens.calls.repairs`.
    """
    if action.token_ids is None and action.written != action.text:
        return action  # it was read from ids that are not those of the conversation
    is_cut = action.finish_reason == "length" and tools is not None
    if action.tool_calls or is_cut:
        tools = None
    reader = reader_of(chat_format)
    if tools is None and not reader.may_think(action):
        return action
    if chat_format is None or action.token_ids is None:
        written = action.text
        text = written if tools is None else reader.unquoted(written)
        answer = reader.read(text, tools, is_cut=is_cut)
        if tools is not None:
            answer = _unspelled(reader.better(answer, text))
    else:
        written = _written(action, reader, chat_format, stopped_by)
        answer = reader.read(written, tools, action.token_ids, is_cut=is_cut)
    if tools is not None and (answer is None or not _num_good(answer)):
        ids = () if chat_format is None else action.token_ids or ()
        read = answer or Answer(content=reader.without_controls(written), is_marked=reader.is_marked(written, ids))
        found = with_repairs(read, reader.calls, tools, is_strict=is_strict)
        answer = answer if found is read else found
    if answer is None:
        return action
    calls = [reader.with_example(call) for call in answer.calls]
    # Reasoning that comes with ids is that of the ids, as in a replay; a server's comes before that in its text.
    own = None if action.token_ids is not None and answer.reasoning is not None else action.reasoning
    thoughts = [thought for thought in (own, answer.reasoning) if thought is not None]
    return dataclasses.replace(
        action,
        text=answer.content.strip(),
        reasoning="\n".join(filter(None, thoughts)) if thoughts else None,
        tool_calls=action.tool_calls or tuple(calls),
        written=written.replace(SPELLED, ""),
    )


def _written(action: Action, reader: AnswerReader, chat_format: Format, stopped_by: str | None) -> str:
    """Decode the ids of an answer with its markers, without its end."""
    ids = action.token_ids or ()
    if ids and ids[-1] in chat_format.stop_token_ids:
        return reader.decode(ids[:-1])
    written = reader.decode(ids)
    if stopped_by is not None and stopped_by in written:
        return written[: written.rindex(stopped_by)]
    # A text that ended the answer is only in its ids, and the agent's text ends before it.
    kept = chat_format.decode(ids)
    if action.finish_reason == "stop" and action.text and kept != action.text and kept.startswith(action.text):
        return written.removesuffix(kept[len(action.text) :])
    return written


def _num_good(answer: Answer) -> int:
    return sum(call.error is None for call in answer.calls)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or NEVER.pattern)


def _spelled(mark: str) -> str:
    return f"{mark[0]}{SPELLED}{mark[1:]}"


def _unspelled(value: Any) -> Any:
    """Take :data:`SPELLED` out of every string of an answer."""
    if isinstance(value, str):
        return value.replace(SPELLED, "")
    if isinstance(value, dict):
        return {_unspelled(key): _unspelled(one) for key, one in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [*map(_unspelled, cast("list[Any]", value))]
    if isinstance(value, tuple):
        return (*map(_unspelled, cast("tuple[Any, ...]", value)),)
    if isinstance(value, Answer | ToolCall):
        fields = {one.name: _unspelled(getattr(value, one.name)) for one in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def _unread(_text: str, _schemas: ArgumentSchemas) -> list[ToolCall]:
    raise MalformedCallError("is part of an answer that is truncated")


def _no_calls(_text: str, _schemas: ArgumentSchemas) -> list[ToolCall]:
    return []


_OF_TEXT = AnswerReader(None, {})
