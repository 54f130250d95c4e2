"""Encode tool calls and their results exactly as a chat template does, or as text if it does not support them.

Results of role ``tool`` are recorded in one of three forms, determined once for the roles of an observation:

- *plain*: the template renders them the same after structured calls as after a plain-text answer;
- *structured*: it renders them differently, or with the names of the tools: the template's output after such calls is
  recorded, from the end of that turn on;
- *text*: it does not support them, and they become the text of a user message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from agentsgym.errors import TemplateError
from agentsgym.tokens.chat_template import OTHER_TEMPLATE, RERENDER, Template
from agentsgym.tokens.control_tokens import Scaffold, Vocabulary
from agentsgym.tokens.sentinels import Roles, unpad
from agentsgym.tokens.tool_messages import TextForm, strings_in, with_strings, with_text_calls
from agentsgym.tokens.tool_template import Answered, ToolTemplate, num_results
from agentsgym.tokens.turn_ends import TurnEnd
from agentsgym.types import Message

ResultForm = Literal["plain", "structured", "text"]
_MAX_SCAFFOLDS = 1024  # if the template renders ids of calls, each observation has its own scaffold


class ToolFormat:
    """The format of tool calls and their results with one tokenizer and its chat template.

    Attributes:
        call_end_id: The token that ends a turn with a call; None if plain text ends it, or if no such token was found.
        opens_results: Whether that token opens the results, rather than ending plain-text turns.
        prints_calls: Whether the template renders structured calls.
        failure: That of :class:`~agentsgym.tokens.tool_template.ToolTemplate`.
        native: The model's own form of calls, if the template renders none; None for the text form.
    """

    def __init__(
        self,
        template: Template,
        vocabulary: Vocabulary,
        observed: Vocabulary,
        turn_end: TurnEnd,
        later: Callable[[Roles, int | None], Scaffold],
        native: TextForm | None,
    ) -> None:
        self._template, self._vocabulary, self._observed = template, vocabulary, observed
        self._turn_end, self._later = turn_end, later
        self._tools = ToolTemplate(template, vocabulary, turn_end)
        self.prints_calls, self.failure = self._tools.prints_calls, self._tools.failure
        self.native = None if self.prints_calls else native
        end = self._tools.end
        self.call_end_id = end.ids[-1] if end and not turn_end.text else None
        self.opens_results = end is not None and end.opens
        self._forms: dict[Roles, ResultForm] = {}
        self._scaffolds: dict[tuple[Roles, Answered, int | None], Scaffold] = {}

    def results(self, messages: Sequence[Message], ended_by: int | None) -> tuple[Scaffold, list[str]]:
        """The scaffold of an observation that begins with tool results, and the contents to write into it.

        Args:
            messages: The observation; a result names the call that it answers, unless the call could not be parsed.
            ended_by: Id that ended the agent's turn.

        Raises:
            TemplateError: The results cannot be appended as the template renders them.
        """
        messages = self.for_template(messages)
        roles, contents = tuple(message["role"] for message in messages), [message["content"] for message in messages]
        if "tool" not in roles or self.result_form(roles) != "structured":
            return self._later(roles, ended_by), contents
        answers = [self._tools.for_template(message) for message in messages[: num_results(roles)]]
        made = tuple(f"call{number:05d}" for number in range(len(answers)))
        ids = tuple(answer["tool_call_id"] for answer in answers) if self._tools.prints_ids else made
        answered = Answered(tuple(answer.get("name", "") for answer in answers), ids)
        key = (roles, answered, ended_by)
        if key not in self._scaffolds:
            if len(self._scaffolds) >= _MAX_SCAFFOLDS:
                self._scaffolds.clear()
            self._scaffolds[key] = self._scaffold(roles, answered, ended_by)
        return self._scaffolds[key], contents

    def result_form(self, roles: Roles) -> ResultForm:
        """Find the form in which results are recorded."""
        if roles in self._forms:
            return self._forms[roles]
        structured, is_plain = self._tools.supports_results, False
        refusal: TemplateError | None = None
        try:
            suffix = self._template.suffix(roles)[0]
            is_plain = not structured or self._tools.agrees_with(roles, suffix)
        except TemplateError as error:
            refusal = error
        if is_plain:
            self._forms[roles] = "plain"
        elif not structured:
            if refusal is not None and (self.failure is not None or self._tools.shows(roles)):
                raise self.failure or refusal
            self._forms[roles] = "text"
        else:
            try:
                self._tools.checked_results(roles)
            except TemplateError as error:
                fix = "" if "; to fix it: " in str(error) else f"; to fix it: {RERENDER}, or {OTHER_TEMPLATE}"
                raise TemplateError(f"{error}{fix}") from refusal
            self._forms[roles] = "structured"
        return self._forms[roles]

    def for_template(self, messages: Sequence[Message]) -> list[Message]:
        """Convert an observation to the form that the template accepts.

        If results are structured, a result whose call could not be parsed becomes text, after the other results.

        Raises:
            TemplateError: See :meth:`result_form`.
        """
        roles = tuple(message["role"] for message in messages)
        return self._in_form(messages, self.result_form(roles)) if num_results(roles) else [*messages]

    def _in_form(self, messages: Sequence[Message], form: ResultForm) -> list[Message]:
        answers = [m for m in messages if form == "structured" and m["role"] == "tool" and "tool_call_id" in m]
        as_text = [message for message in messages if message not in answers]
        if form == "plain" or all(message["role"] != "tool" for message in as_text):
            return [*messages]
        # The text form of one user message: content of other roles follows an empty line, unchanged.
        results = [f"<tool_response>\n{m['content']}\n</tool_response>" for m in as_text if m["role"] == "tool"]
        others = [message["content"] for message in as_text if message["role"] != "tool"]
        return [*answers, {"role": "user", "content": "\n\n".join(["\n".join(results), *others])}]

    def conversation(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Convert a complete conversation to the form that the template accepts, except for calls in a native form.

        Raises:
            TemplateError: See :meth:`result_form`.
        """
        taken: list[dict[str, Any]] = []
        observation: list[Message] = []
        for message in messages:
            if message["role"] == "assistant":
                taken += [self._tools.for_template(m) for m in self._as_possible(observation)]
                observation = []
                if self.prints_calls or "tool_calls" not in message:
                    taken.append(self._tools.for_template(message))
                else:
                    taken.append({**(with_text_calls(message) if self.native is None else message)})
            else:
                observation.append(message)
        return taken + [self._tools.for_template(m) for m in self._as_possible(observation)]

    def with_native_calls(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Write the calls of assistant messages into their texts, if the model has a native form."""
        if self.native is None:
            return messages
        return [with_text_calls(one, self.native) if "tool_calls" in one else one for one in messages]

    def write(self, message: Message, around_thought: tuple[str, str] = ("", "")) -> tuple[list[int], list[int]]:
        """The ids of an answer with calls or reasoning as the template renders it, without and with its end of turn.

        Args:
            message: The answer.
            around_thought: What stands around its reasoning, if the template omits it.

        Raises:
            TemplateError: The template rejects the answer.
        """
        end = self._tools.end.ids if self._tools.end and message.get("tool_calls") else self._turn_end.ids
        texts = strings_in(message)
        masked, hidden = self._vocabulary.hide(texts)
        [answered] = self.with_native_calls([with_strings(message, dict(zip(texts, masked, strict=True)))])
        answer = self._tools.answer(answered)
        thought = answered.get("reasoning_content") if any(around_thought) else None
        if thought is not None:
            answer = thought.join(around_thought) + answer
        encode = self._vocabulary.encode_printed
        token_ids = encode(answer, hidden, first=False)
        if self._turn_end.text and end:
            return token_ids, encode(answer + self._turn_end.text, hidden, first=False)
        return token_ids, [*token_ids, *end]

    def _as_possible(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Convert an observation to the form that the template accepts, even if it could not be appended."""
        try:
            return self.for_template(messages)
        except TemplateError:
            return self._in_form(messages, "structured" if self._tools.supports_results else "plain")

    def _scaffold(self, roles: Roles, answered: Answered, ended_by: int | None) -> Scaffold:
        """Render an observation after structured calls; tool names are masked, since the agent wrote them."""
        num = len(answered.names)

        def masked(contents: Sequence[str]) -> tuple[Answered, list[str], dict[int, str]]:
            texts, hidden = self._observed.hide([*answered.names, *answered.ids, *contents])
            return Answered(tuple(texts[:num]), tuple(texts[num : 2 * num])), texts[2 * num :], hidden

        end = self._tools.end
        is_written = end is not None and ended_by is not None and (not end.opens or ended_by == end.ids[-1])
        written = end.text if end is not None and is_written else ""  # the end of the turn, by the agent

        def rerender(contents: list[str]) -> list[int]:
            calls, contents, hidden = masked(contents)
            text = self._tools.results(roles, calls, contents)
            return self._observed.encode_printed(text[len(written) :], hidden, first=False)

        calls, _, hidden = masked([])
        text, changes = unpad(self._tools.results(roles, calls), roles)
        head, pieces = self._observed.pieces(text[len(written) :], first=False, hidden=hidden)
        return Scaffold(head, pieces, changes if any(changes) else None, self._template.acts_on, rerender)
