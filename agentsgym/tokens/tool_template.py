"""Determine how a chat template renders tool calls and tool results, by rendering small probe conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from agentsgym.errors import TemplateError
from agentsgym.tokens.chat_template import ANOTHER_TIME, Template, works
from agentsgym.tokens.control_tokens import Vocabulary
from agentsgym.tokens.sentinels import (
    ANSWER,
    ANSWERED,
    PAD_LEFT,
    PAD_RIGHT,
    QUESTION,
    REPLY,
    Printed,
    Roles,
    slot,
    unpad,
    up_to_last,
)
from agentsgym.tokens.tool_messages import named_id, short_id
from agentsgym.tokens.turn_ends import CallEnd, TurnEnd, common_prefix, find_call_end

ARGUMENT = "argumentsentinel"
_FIRST = "sentinel0_"  # ends the first result
_STRAY_PROMPT = (
    "prints its generation prompt even if none is requested",
    "print it under {% if add_generation_prompt %}",
)
_NO_END = (
    "must end a call in the last message as it does before a tool's result",
    "end the last answer too, by an option of the template in chat_template_kwargs or in tokenizer.chat_template",
)
_PARTIAL_TAG = re.compile(r"<[^<>]*\Z")

Conversation = list[Mapping[str, Any]]


class Answered(NamedTuple):
    """The names and ids of the calls that an observation's tool messages answer, one each, in order."""

    names: tuple[str, ...]
    ids: tuple[str, ...]


def num_results(roles: Roles) -> int:
    """Count the tool messages that an observation begins with."""
    return next((index for index, role in enumerate(roles) if role != "tool"), len(roles))


def probe_calls(num_calls: int, num_earlier: int = 0) -> Answered:
    """Return names and ids for probe calls, with other ids than those of ``num_earlier`` calls."""
    numbers = range(1, num_calls + 1)
    return Answered(tuple(f"tool_{n}" for n in numbers), tuple(f"call{num_earlier + n:05d}" for n in numbers))


class ToolTemplate:
    """A chat template as a function from calls and results to text.

    Attributes:
        prints_calls: Whether the template renders structured calls.
        supports_results: Whether it renders a message of role ``tool`` after a call.
        end: End of a turn that calls a tool; None if the template does not render calls or the end is ambiguous.
        prints_ids: Whether the template renders the ids of calls.
        failure: The error that kept the template from rendering a call or a result; None if there was none, or if the
            template itself rejects calls or results with ``raise_exception``.
    """

    def __init__(self, template: Template, vocabulary: Vocabulary, end: TurnEnd) -> None:
        """Probe the template with a tool call.

        Args:
            template: The template; each rendering includes the environment's tools, if there are any.
            vocabulary: The tokenizer's control tokens.
            end: The template's end of plain-text turns.
        """
        self._template = template
        self._turn_end = end
        self._arguments_as_text = False
        self._short_ids, self._named_ids = False, False
        self._rejects_reasoning_with_text = False
        self.failure: TemplateError | None = None
        after_final_call = self._after_call([], add_prompt=False)
        if after_final_call is None:
            self._arguments_as_text, self.failure = True, None
            after_final_call = self._after_call([], add_prompt=False)
        self.prints_calls = after_final_call is not None or self.failure is not None
        self.supports_results, self.end, self.prints_ids = False, cast("CallEnd | None", None), False
        if after_final_call is None:
            return
        named = self.call_message(Answered(("namesentinel",), ("call00000",)))
        self._named_ids = "namesentinel" not in self._render([QUESTION, named], add_prompt=False)
        after_followed_call = self._before("tool")
        self.supports_results = after_followed_call is not None
        after_followed_call = after_followed_call if after_followed_call is not None else self._before("user")
        if after_followed_call is not None:
            self.end = find_call_end(after_final_call, after_followed_call, end, vocabulary)
        prompts = [vocabulary.pattern.findall(text)[-1:] for text in (after_final_call, self._render([QUESTION]))]
        self._has_stray_prompt = prompts[0] == prompts[1] != []
        if self.supports_results:
            self._learn_ids()
        thoughtful = {**self.call_message(probe_calls(1)), "reasoning_content": "thought"}
        accepts = [self._accepts([QUESTION, {**thoughtful, "content": content}]) for content in ("", "text")]
        self._rejects_reasoning_with_text = accepts == [True, False]

    def call_message(self, answered: Answered, content: str = "") -> dict[str, Any]:
        """Build an assistant message with one call for each name."""
        calls = [
            {"type": "function", "id": call_id, "function": {"name": name, "arguments": {"argument": ARGUMENT}}}
            for name, call_id in zip(*answered, strict=True)
        ]
        return {"role": "assistant", "content": content, "tool_calls": calls}

    def for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a message with tool calls or a tool result to the variant that the template accepts."""
        taken: Any = {**message}
        if "tool_call_id" in taken:
            taken["tool_call_id"] = self._id_for_template(taken["tool_call_id"], taken.get("name", ""))
        if calls := taken.get("tool_calls"):
            if self._rejects_reasoning_with_text and taken.get("reasoning_content") and taken["content"]:
                taken["reasoning_content"] += "\n\n" + taken["content"]
                taken["content"] = ""
            written: list[dict[str, Any]] = [{**call, "function": {**call["function"]}} for call in calls]
            taken["tool_calls"] = written
            for call in written:
                function = call["function"]
                if "id" in call:
                    call["id"] = self._id_for_template(call["id"], function["name"])
                if self._arguments_as_text and not isinstance(function["arguments"], str):
                    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return taken

    def results(self, roles: Roles, answered: Answered, contents: Sequence[str] | None = None) -> str:
        """Render what follows a turn that called tools, from the end of that turn up to the generation prompt.

        Args:
            roles: Roles of the observation, tool messages first.
            answered: The calls that these answer.
            contents: Contents of the messages; None for padded sentinels.
        """
        text, cut = self._cut([QUESTION, self.call_message(answered)], roles, answered)
        if contents is None:
            return text[cut:]
        new = self._messages(roles, answered, contents)
        real = self._render([QUESTION, self.call_message(answered), *new])
        if real[:cut] != text[:cut]:
            raise TemplateError("the chat template prints a call differently depending on a tool's result")
        return real[cut:]

    def checked_results(self, roles: Roles) -> Printed:
        """Render what follows a turn that called tools, without padding."""
        answered = probe_calls(num_results(roles))
        call = self.call_message(answered)
        text = self.results(roles, answered)
        printed = unpad(text, roles)
        earlier: Conversation = [QUESTION, call, *self._messages(roles, answered, [f"word{n}" for n in range(9)])]
        again = probe_calls(len(answered.ids), len(answered.ids))  # other ids: some templates number results by them
        others: dict[str, tuple[Conversation, Answered]] = {
            "in a second round of calls": ([*earlier, self.call_message(again)], again),
            "after an earlier answer": ([QUESTION, REPLY, QUESTION, call], answered),
            "after a call with text": ([QUESTION, {**call, "content": ANSWER}], answered),
        }
        for place, (before, calls) in others.items():
            other, cut = self._cut(before, roles, calls)
            expected = text if calls is answered else self.results(roles, calls)
            # Gemma 4 moves the text of an assistant message after the tool results, although the agent wrote it before.
            is_same = other[cut:].startswith(up_to_last(text, roles)) if "text" in place else other[cut:] == expected
            if not is_same:
                raise TemplateError(f"the chat template prints tool results differently {place}")
        new = self._messages(roles, answered)
        later = self._render([QUESTION, call, *new, REPLY, QUESTION])
        start = self._end_in(later)
        if not later[start:].startswith(up_to_last(text, roles)):
            raise TemplateError("the chat template prints tool results differently once the conversation continues")
        if ANOTHER_TIME in text:
            raise TemplateError(
                "the chat template prints the current time around tool results, so their text cannot be rendered again"
            )
        # An answer after results must begin where their generation prompt ends.
        prompted, history = self._render([QUESTION]), self._render([QUESTION], add_prompt=False)
        prompt = prompted[len(history) :] if prompted.startswith(history) else ""
        if not prompt and prompted.startswith(self._template.around_answer([QUESTION, ANSWERED])[0]):
            prompt = prompted.rpartition(QUESTION["content"])[2]  # printed even if none is requested
        if not prompt or not text.endswith(prompt):
            whole, _, _ = self._render([QUESTION, call, *new, ANSWERED]).partition(ANSWER)
            if not whole.endswith(text):
                raise TemplateError(
                    "the chat template adds no generation prompt after tool results, but prints text before the answer "
                    "once the answer is part of the history"
                )
        return printed

    def agrees_with(self, roles: Roles, suffix: str) -> bool:
        """Whether an observation is rendered the same after structured tool calls as after a plain-text answer."""
        try:
            return self.checked_results(roles)[0] == suffix
        except TemplateError:
            one: Roles = ("tool", *roles[num_results(roles) :])
            if one == roles or self._accepts([QUESTION, self.call_message(probe_calls(2))]):
                return False
            plain = self._template.suffix(one)[0]
            return self.agrees_with(one, plain)

    def shows(self, roles: Roles) -> bool:
        """Whether the template renders, in any form, an observation after a plain-text answer."""
        messages = self._messages(roles, probe_calls(num_results(roles)))
        try:
            text = self._render([QUESTION, REPLY, *messages])
        except TemplateError:
            return False
        return all(f"sentinel{index}_" in text for index in range(len(roles)))

    def answer(self, message: Mapping[str, Any]) -> str:
        """Render an agent's answer that has calls or reasoning, without its end of turn."""
        prompt = self._render([QUESTION])
        if calls := message.get("tool_calls"):
            self._check_calls(message, calls)
            answered = Answered(tuple(call["function"]["name"] for call in calls), tuple(call["id"] for call in calls))
            if self.supports_results:
                text, cut = self._cut([QUESTION, message], ("tool",) * len(calls), answered)
            else:
                text, cut = self._cut([QUESTION, message], ("user",), Answered((), ()))
            text = text[:cut]
            message = self.for_template(message)
            asked = common_prefix(self._render([QUESTION], add_prompt=False), text)  # a prompt may begin a thought
            if message["content"].strip() not in text[len(asked) :]:
                text = prompt + message["content"] + text[len(_shared(prompt, text)) :]
        else:
            closing = self._template.after_answer([QUESTION, ANSWERED], add_prompt=False)
            text = self._render([QUESTION, message], add_prompt=False)
            if not text.endswith(closing):
                raise TemplateError("the chat template ends answers with and without reasoning differently")
            text = text[: len(text) - len(closing)] + self._turn_end.before
        return text[len(_shared(prompt, text)) :]

    def _check_calls(self, message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> None:
        """Check that each call of an answer would be rendered: some templates render only the first, or none.

        Names and arguments are sentinels here, since two calls may be the same.
        """
        probes: list[dict[str, Any]] = []
        sought: list[list[str]] = []
        for index, call in enumerate(calls):
            keys: Sequence[str] = [*call["function"]["arguments"]]
            sought.append([f"call{index}sentinel_", *(f"call{index}value{n}_" for n in range(len(keys)))])
            arguments = dict(zip(keys, sought[-1][1:], strict=True))
            probes.append({**call, "function": {"name": sought[-1][0], "arguments": arguments}})
        text = self._render([QUESTION, {**message, "tool_calls": probes}], add_prompt=False)
        num_printed = sum(all(sentinel in text for sentinel in one) for one in sought)
        if num_printed < len(calls):
            text_too = " together with its text" if message["content"] else ""
            raise TemplateError(
                f"the chat template prints {num_printed} of the {len(calls)} calls of an answer{text_too}"
            )

    def _id_for_template(self, call_id: str, name: str) -> str:
        if self._named_ids:
            return named_id(call_id, name)
        return short_id(call_id) if self._short_ids else call_id

    def _render(self, messages: Sequence[Mapping[str, Any]], *, add_prompt: bool = True) -> str:
        return self._template.render(
            [self.for_template(m) for m in messages], add_prompt=add_prompt, **self._template.frozen
        )

    def _messages(self, roles: Roles, answered: Answered, contents: Sequence[str] | None = None) -> Conversation:
        num_calls = num_results(roles)
        if contents is None:
            contents = [PAD_LEFT + slot(index) + PAD_RIGHT for index in range(len(roles))]
        messages: Conversation = []
        for index, (role, content) in enumerate(zip(roles, contents, strict=False)):
            known = {"name": answered.names[index], "tool_call_id": answered.ids[index]} if index < num_calls else {}
            messages.append({"role": role, "content": content, **known})
        return messages

    def _after_call(self, after: Conversation, *, add_prompt: bool = True) -> str | None:
        """Render what follows the argument of a call; None if the template does not render it exactly once."""
        try:
            text = self._render([QUESTION, self.call_message(probe_calls(1)), *after], add_prompt=add_prompt)
        except TemplateError as error:
            # `raise_exception` raises jinja2's own class; its subclasses and other exceptions are not rules.
            if type(error.__cause__).__name__ != "TemplateError":
                self.failure = error
            return None
        return text.partition(ARGUMENT)[2] if text.count(ARGUMENT) == 1 else None

    def _before(self, role: str) -> str | None:
        """Render the text between a call and the content of the next message; None if that content is not rendered."""
        behind = self._after_call(self._messages((role,), probe_calls(1)))
        if behind is None or behind.count(_FIRST) != 1:
            return None
        return behind.partition(_FIRST)[0]

    def _learn_ids(self) -> None:
        one, other = probe_calls(1), Answered(("tool_1",), ("call00009",))
        long = Answered(("tool_1",), ("call_0123456789abcdef",))
        if self.end is None:
            return
        try:
            self.prints_ids = self.results(("tool",), one) != self.results(("tool",), other)
        except TemplateError:
            return
        self._short_ids = not works(partial(self.results, ("tool",)), long)

    def _accepts(self, messages: Conversation) -> bool:
        return works(partial(self._render, add_prompt=False), messages)

    def _cut(self, before: Conversation, roles: Roles, answered: Answered) -> tuple[str, int]:
        """Render an observation of padded sentinels after a call, and find where the turn of the call ends."""
        text = self._render([*before, *self._messages(roles, answered)])
        return text, self._end_in(text)

    def _end_in(self, text: str) -> int:
        """Find where the turn before the first result ends."""
        if self.end is None:
            problem, fix = _STRAY_PROMPT if self._has_stray_prompt else _NO_END
            raise TemplateError(
                f"the chat template {problem}, so the end of the call cannot be found; to fix it: {fix}"
            )
        first = text.rfind(_FIRST)
        edge = text.rfind(self.end.text, 0, first) if first >= 0 else -1
        if edge < 0:
            raise TemplateError("the chat template must render a tool's result exactly once, after its call")
        return edge


def _shared(prompt: str, text: str) -> str:
    """The beginning of a prompt that a text has, too, without a part of a tag: <think> and <tool_call> share "<t"."""
    shared = "".join(common_prefix(prompt, text))
    return shared if shared == prompt else _PARTIAL_TAG.sub("", shared)
