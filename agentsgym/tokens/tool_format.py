"""Write tool calls and their results exactly as a chat template does, or as text where it has no form for them.

Results of role ``tool`` are recorded in one of three ways, found once for each shape of observation:

- *plain*: the template prints them after structured calls as after an answer of plain text;
- *structured*: it prints them differently, or with the names of the tools: they are printed after such calls, and
  what follows the end of that turn is taken;
- *text*: it has no form for them, and they are the text of a user message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from agentsgym.errors import TemplateError
from agentsgym.tokens.chat_template import OTHER_TEMPLATE, RERENDER, Template
from agentsgym.tokens.control_tokens import Scaffold, Vocabulary
from agentsgym.tokens.sentinels import Roles, unpad
from agentsgym.tokens.tool_messages import results_as_user, strings_in, with_strings, with_text_calls
from agentsgym.tokens.tool_template import Answered, ToolTemplate, num_results
from agentsgym.tokens.turn_ends import TurnEnd
from agentsgym.types import Message

Way = Literal["plain", "structured", "text"]
_MAX_SCAFFOLDS = 1024  # where ids of calls are printed, each observation has its own


class ToolFormat:
    """How one tokenizer writes calls of tools and their results.

    Attributes:
        call_end_id: The token that ends a turn which calls a tool; None if text does, or no token that is known.
        opens_results: Whether that token opens the results, and ends no turn of plain text.
        prints_calls: Whether the template prints structured calls.
    """

    __slots__ = (
        "_later",
        "_observed",
        "_scaffolds",
        "_shapes",
        "_template",
        "_tools",
        "_turn_end",
        "_vocabulary",
        "call_end_id",
        "opens_results",
        "prints_calls",
    )

    def __init__(
        self,
        template: Template,
        vocabulary: Vocabulary,
        observed: Vocabulary,
        turn_end: TurnEnd,
        later: Callable[[Roles, int | None], Scaffold],
    ) -> None:
        """Find how the template writes a call.

        Args:
            template: The chat template.
            vocabulary: Vocabulary for the agent's own text.
            observed: Vocabulary for observations.
            turn_end: The template's end of plain-text turns.
            later: Function of roles and what ended the turn: the scaffold of an observation after plain text.
        """
        self._template, self._vocabulary, self._observed = template, vocabulary, observed
        self._turn_end, self._later = turn_end, later
        self._tools = ToolTemplate(template, vocabulary, turn_end)
        self.prints_calls = self._tools.prints_calls
        end = self._tools.end
        self.call_end_id = end.ids[-1] if end and not turn_end.text else None
        self.opens_results = end is not None and end.opens
        self._shapes: dict[Roles, Way] = {}
        self._scaffolds: dict[tuple[Roles, Answered, int | None], Scaffold] = {}

    def results(self, messages: Sequence[Message], ended_by: int | None) -> tuple[Scaffold, list[str]]:
        """The scaffold of an observation that begins with results of tools, and the contents to write into it.

        Args:
            messages: The observation; a result names the call that it answers, unless that could not be read.
            ended_by: Id that ended the agent's turn.

        Raises:
            TemplateError: The template prints results in no way that can be appended.
        """
        messages = self.for_template(messages)
        roles = tuple(message["role"] for message in messages)
        if "tool" in roles and self.way(roles) == "structured":
            return self._structured(messages, roles, ended_by), [message["content"] for message in messages]
        return self._later(roles, ended_by), [message["content"] for message in messages]

    def way(self, roles: Roles) -> Way:
        """Find in which way results are printed.

        Raises:
            TemplateError: In none that can be appended.
        """
        way = self._shapes.get(roles)
        if way is None:
            way = self._shapes[roles] = self._find_way(roles)
        return way

    def for_template(self, messages: Sequence[Message]) -> list[Message]:
        """Put an observation into the form that the template takes; the same again if it is in it.

        A result that answers no call which could be read goes into the text form where results are structured, after
        those that do.

        Raises:
            TemplateError: See :meth:`way`.
        """
        roles = tuple(message["role"] for message in messages)
        return self._in_way(messages, self.way(roles)) if num_results(roles) else [*messages]

    def _in_way(self, messages: Sequence[Message], way: Way) -> list[Message]:
        answers = [m for m in messages if way == "structured" and m["role"] == "tool" and "tool_call_id" in m]
        as_text = [message for message in messages if message not in answers]
        if way == "plain" or all(message["role"] != "tool" for message in as_text):
            return [*messages]
        text = results_as_user([(message["role"], message["content"]) for message in as_text])
        return [*answers, {"role": "user", "content": text}]

    def conversation(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Put a whole conversation into the form that the template takes.

        Raises:
            TemplateError: See :meth:`way`.
        """
        taken: list[dict[str, Any]] = []
        observation: list[Message] = []
        for message in messages:
            if message["role"] == "assistant":
                taken += [self._tools.for_template(m) for m in self._as_possible(observation)]
                observation = []
                taken.append(self._answer_for_template(message))
            else:
                observation.append(message)
        return taken + [self._tools.for_template(m) for m in self._as_possible(observation)]

    def write(self, message: Message) -> tuple[list[int], list[int]]:
        """The ids of an answer that has calls or reasoning, in the template's own form, without its end and with it.

        Raises:
            TemplateError: The template does not take the answer.
        """
        end = self._tools.end.ids if self._tools.end and message.get("tool_calls") else self._turn_end.ids
        texts = strings_in(message)
        masked, hidden = self._vocabulary.hide(texts)
        answer = self._tools.answer(with_strings(message, dict(zip(texts, masked, strict=True))))
        encode = self._vocabulary.encode_printed
        token_ids = encode(answer, hidden, first=False)
        if self._turn_end.text and end:
            return token_ids, encode(answer + self._turn_end.text, hidden, first=False)
        return token_ids, [*token_ids, *end]

    def _answer_for_template(self, message: Message) -> dict[str, Any]:
        if "tool_calls" in message and not self.prints_calls:
            return {**with_text_calls(message)}
        return self._tools.for_template(message)

    def _as_possible(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Put an observation into the form that the template takes, where new ones need not be appended."""
        try:
            return self.for_template(messages)
        except TemplateError:
            return self._in_way(messages, "structured" if self._takes_structured() else "plain")

    def _takes_structured(self) -> bool:
        return self._tools.prints_calls and self._tools.takes_results

    def _find_way(self, roles: Roles) -> Way:
        structured = self._takes_structured()
        refusal: TemplateError | None = None
        try:
            suffix = self._template.suffix(roles)[0]
            if not structured or self._tools.agrees_with(roles, suffix):
                return "plain"
        except TemplateError as error:
            refusal = error
        if not structured:
            if refusal is not None and self._tools.shows(roles):
                raise refusal
            return "text"
        try:
            self._tools.checked_results(roles)
        except TemplateError as error:
            raise TemplateError(f"{error}; to fix it: {RERENDER}, or {OTHER_TEMPLATE}") from refusal
        return "structured"

    def _structured(self, messages: Sequence[Message], roles: Roles, ended_by: int | None) -> Scaffold:
        answers = [self._tools.for_template(message) for message in messages[: num_results(roles)]]
        made = tuple(f"call{number:05d}" for number in range(len(answers)))
        ids = tuple(answer["tool_call_id"] for answer in answers) if self._tools.prints_ids else made
        answered = Answered(tuple(answer.get("name", "") for answer in answers), ids)
        key = (roles, answered, ended_by)
        scaffold = self._scaffolds.get(key)
        if scaffold is None:
            if len(self._scaffolds) >= _MAX_SCAFFOLDS:
                self._scaffolds.clear()
            scaffold = self._scaffolds[key] = self._scaffold(roles, answered, ended_by)
        return scaffold

    def _scaffold(self, roles: Roles, answered: Answered, ended_by: int | None) -> Scaffold:
        """Print the observation after structured calls. Names of tools are the agent's words, and hidden."""
        num = len(answered.names)

        def masked(contents: Sequence[str]) -> tuple[Answered, list[str], dict[int, str]]:
            texts, hidden = self._observed.hide([*answered.names, *answered.ids, *contents])
            return Answered(tuple(texts[:num]), tuple(texts[num : 2 * num])), texts[2 * num :], hidden

        def unended(text: str) -> str:
            return text if self._tools.end is None else self._tools.end.without(text, ended_by)

        def rerender(contents: list[str]) -> list[int]:
            calls, contents, hidden = masked(contents)
            text = self._tools.results(roles, calls, contents)
            return self._observed.encode_printed(unended(text), hidden, first=False)

        calls, _, hidden = masked([])
        text, changes = unpad(self._tools.results(roles, calls), roles)
        head, pieces = self._observed.pieces(unended(text), first=False, hidden=hidden)
        return Scaffold(head, pieces, changes if any(changes) else None, self._template.acts_on, rerender)
