"""Find the tokens that end an agent's turn, from a chat template's output after an answer and after a call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple, TypeVar

from agentsgym.errors import TemplateError
from agentsgym.tokens.chat_template import Template
from agentsgym.tokens.control_tokens import Vocabulary
from agentsgym.tokens.sentinels import ANSWERED, QUESTION, SLOT, slot

ENDED_BY_TEXT = -1  # in place of the id that ended a turn, if the template ends turns with plain text

T = TypeVar("T")


class TurnEnd(NamedTuple):
    """How a template ends a plain-text turn of the agent.

    Attributes:
        ids: Ids appended to end a turn that was given as text; empty if the template does not end turns.
        before: Plain text before the end-of-turn token, appended to turns given as text (``" "`` for ``" </s>"``).
        text: The plain text that ends a turn; empty if a token does.
        closes: Whether the ids only end the turn; False if the token that opens the next message ends it.
        opens_result: If ``closes`` is False, the token that the agent samples before a tool's result.
    """

    ids: tuple[int, ...] = ()
    before: str = ""
    text: str = ""
    closes: bool = True
    opens_result: int | None = None


def find_turn_end(template: Template, vocabulary: Vocabulary) -> TurnEnd:
    """Compare what follows an answer at the end of a conversation with what follows it when a user speaks next.

    The end-of-turn token is at the same position in both texts (but may be another token in the middle than at the end,
    as in gpt-oss). Otherwise, the common prefix of the two texts ends the turn, if it is not empty; or the token that
    opens the next message does, if it follows the answer directly.

    Raises:
        TemplateError: The template does not render the answer once and unchanged.
    """
    last = template.after_answer([QUESTION, ANSWERED], add_prompt=False)
    middle = _in_front_of("user", template)
    (last_text, at_last), (middle_text, at_middle) = vocabulary.lead(last), vocabulary.lead(middle)
    if at_last and at_middle and last_text == middle_text:
        shared = len(common_prefix(at_last, at_middle))
        return TurnEnd(tuple(control.token_id for control in at_last[: max(shared, 1)]), before=last_text)
    if text := "".join(common_prefix(last_text, middle_text)):
        return TurnEnd(tuple(vocabulary.encode(text)), text=text)
    if not at_middle or middle_text:
        return TurnEnd()
    try:
        _, controls = vocabulary.lead(_in_front_of("tool", template))
    except TemplateError:
        controls = []
    opens_result = controls[0].token_id if controls else None
    return TurnEnd((at_middle[0].token_id,), closes=False, opens_result=opens_result)


def _in_front_of(role: str, template: Template) -> str:
    """Render the text between an answer and the content of the next message."""
    return SLOT.split(template.after_answer([QUESTION, ANSWERED, {"role": role, "content": slot(0)}]))[0]


def common_prefix(one: Sequence[T], other: Sequence[T]) -> list[T]:
    """The longest common prefix."""
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def without_end(suffix: str, ended_by: int, end: TurnEnd, vocabulary: Vocabulary) -> str:
    """Remove the end of the turn, which the agent already wrote, from the beginning of the text after an answer."""
    if end.text:
        return suffix.removeprefix(end.text)
    before, controls = vocabulary.lead(suffix)
    if not controls or before != end.before:
        return suffix
    if not end.closes and controls[0].token_id != ended_by:
        return suffix  # it opens the next message, and the agent ended its turn with another token
    edge = len(before)
    for _ in zip(controls, end.ids, strict=False):
        match = vocabulary.pattern.match(suffix, edge)
        edge = match.end() if match else edge
    return suffix[edge:]


class CallEnd(NamedTuple):
    """How a template ends a turn in which the agent calls tools.

    Attributes:
        text: Output of the template at the end of the turn.
        ids: Its ids.
        opens: Whether it opens the results, and so must precede them however the agent ended its turn
            (``<|tool_response>`` of Gemma 4).
    """

    text: str
    ids: tuple[int, ...]
    opens: bool


def find_call_end(after_last: str, after_middle: str, end: TurnEnd, vocabulary: Vocabulary) -> CallEnd | None:
    """Find the end of a turn that calls a tool; None if it has no distinguishable end.

    Args:
        after_last: Output of the template after the last argument of the last call, at the end of a conversation.
        after_middle: The same output, up to the tool's result, in the middle of a conversation.
        end: The template's end of plain-text turns.
        vocabulary: Its control tokens.
    """
    if end.text:
        found = end.text in after_middle
        return CallEnd(end.text, end.ids, opens=False) if found else None
    matches = [*vocabulary.pattern.finditer(after_middle)]
    names = [vocabulary.control_in(match).token_id for match in matches]
    for index in range(len(matches)):
        if end.closes and end.ids and tuple(names[index : index + len(end.ids)]) == end.ids:
            text = after_middle[matches[index].start() : matches[index + len(end.ids) - 1].end()]
            return CallEnd(text, end.ids, opens=False)
        if not end.closes and names[index] == end.opens_result:
            return CallEnd(matches[index][0], (names[index],), opens=True)
    for index, match in enumerate(matches):  # the last control token that also ends a conversation
        if after_last == after_middle[: match.end()]:
            rest = after_middle[match.end() :].lstrip()
            return CallEnd(match[0], (names[index],), opens=vocabulary.pattern.match(rest) is None)
    return None
