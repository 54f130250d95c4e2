"""How a tokenizer writes a conversation, found once: afterwards no template runs and only new text is encoded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from agentsgym.errors import TemplateError
from agentsgym.rollouts.chat_template import ASKED, QUESTION, SLOT, Change, Roles, Template, slot
from agentsgym.rollouts.vocabulary import Piece, Scaffold, Vocabulary
from agentsgym.types import FinishReason, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENDED_BY_TEXT = -1  # stands for the id that ended a turn, where the template ends turns by plain text

T = TypeVar("T")


class ChatFormat:
    """How one tokenizer writes a conversation; get it with :meth:`of`.

    Attributes:
        end_of_turn_id: The control token that closes an agent turn; None if the template closes turns by plain text
            or not at all, and without a template.
        end_of_turn_ids: What closes an agent's turn that was given as text; empty if nothing closes a turn, and
            without a template.
        stop_token_ids: Every id that ends a turn when it is sampled.
        rewrites_history: Whether the template, run over the whole conversation again, would change earlier answers
            (drops thinking, trims): the record then differs from its full render, and is what the agent saw.
        vocabulary_size: Every id of the tokenizer is smaller.
        text_before_end: Plain text in front of the end-of-turn token, part of a text turn (``" "`` for ``" </s>"``).
        text_end: The plain text that closes a turn; empty if a token does.
        answer_trim: How the template trims the agent's answers, applied to those given as text; None if not.
    """

    __slots__ = (
        "_closing",
        "_first",
        "_fits",
        "_later",
        "_refusal",
        "_template",
        "_vocabulary",
        "answer_trim",
        "end_of_turn_id",
        "end_of_turn_ids",
        "rewrites_history",
        "stop_token_ids",
        "text_before_end",
        "text_end",
        "vocabulary_size",
    )

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        mine: Any = copy.copy(tokenizer)  # shallow: the cache in `of` must not keep its own key alive
        self._fits = _fingerprint(tokenizer)
        self._vocabulary = Vocabulary(mine)
        self.vocabulary_size = self._vocabulary.size
        self._template = Template(mine) if mine.chat_template else None
        self._first: dict[Roles, tuple[str, Scaffold]] = {}
        self._later: dict[tuple[Roles, int | None], Scaffold] = {}
        self.end_of_turn_id: int | None = None
        self.end_of_turn_ids: tuple[int, ...] = ()
        self.text_before_end = ""
        self._closing = True  # False: the token that opens the next message ends the turn
        self.text_end = ""
        self._refusal: str | None = None
        self.rewrites_history = False
        self.answer_trim: Change | None = None
        stops = {mine.eos_token_id}
        if self._template is not None:
            self._learn(self._template)
            stops |= {self.end_of_turn_id, self._opens_tool_message(self._template)}
        self.stop_token_ids = frozenset(token_id for token_id in stops if token_id is not None)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, append: bool = True) -> ChatFormat:
        """The format of a tokenizer, found at the first call and again when its template or vocabulary was changed.

        Args:
            tokenizer: Its chat template, if it has one, decides.
            append: Whether new messages are to be appended to what is recorded; False if each prompt is rendered
                afresh, which takes templates that print something else in a later turn than in the first.

        Raises:
            TemplateError: The chat template does not print the messages of a plain conversation once and unchanged.
        """
        known = _FORMATS.get(tokenizer)
        if known is None or known._fits != _fingerprint(tokenizer):
            known = _FORMATS[tokenizer] = cls(tokenizer)
        if append and known._refusal is not None:
            raise TemplateError(known._refusal)
        return known

    def encode(self, text: str) -> list[int]:
        """Encode plain text as it stands inside a conversation; what looks like a control token stays text."""
        vocabulary = self._vocabulary
        return vocabulary.encode_first(text) if self._template is None else vocabulary.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens left out."""
        return self._vocabulary.decode(ids, True)

    def ended_by(self, ids: Sequence[int], finish_reason: FinishReason) -> int | None:
        """Which id ended the agent's turn; :data:`ENDED_BY_TEXT` if text did, None if nothing did.

        Args:
            ids: What the agent sampled.
            finish_reason: Where it is ``"stop"``, any control token at the end is one that the agent stops at: a
                model may declare more of them than template and tokenizer know.
        """
        if not ids:
            return None
        ends = self._vocabulary.control_ids if finish_reason == "stop" else self.stop_token_ids
        if ids[-1] in ends or ids[-1] in self.stop_token_ids:
            return ids[-1]
        if self.text_end:
            tail = ids[-len(self.text_end.encode()) :]  # no token is shorter than a byte
            if self._vocabulary.decode(tail, False).endswith(self.text_end):
                return ENDED_BY_TEXT
        return None

    def render(self, messages: Sequence[Message], *, ask: bool = True) -> list[int]:
        """The exact ids of a whole conversation, rendered afresh by the template with its real contents.

        Rules that look at contents apply: a template that drops old thinking drops it here. What looks like a control
        token inside a content is plain text, as everywhere; for all other text these are the ids of
        ``tokenizer.apply_chat_template``. Without a template the contents are encoded one by one.

        Args:
            messages: The conversation, answers of the agent included.
            ask: Whether to add the generation prompt.

        Raises:
            TemplateError: The template cannot render the conversation.
        """
        contents = [message["content"] for message in messages]
        if self._template is None:
            return [token_id for content in contents for token_id in self.encode(content)]
        contents, hidden = self._vocabulary.hide(contents)
        conversation = [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]
        return self._vocabulary.encode_printed(self._template.render(conversation, ask=ask), hidden)

    def first(self, roles: Roles) -> Scaffold:
        """The scaffold of a conversation's first prompt; found again when the template prints another date.

        Raises:
            TemplateError: The template does not take these roles, changes their contents, or does not leave them as
                and where they are in later turns.
        """
        template = self._template
        today = "" if template is None else template.today(roles)
        known = self._first.get(roles)
        if known is None or known[0] != today:
            scaffold = self._bare(roles) if template is None else self._scaffold(template, roles, None, first=True)
            known = self._first[roles] = today, scaffold
        return known[1]

    def later(self, roles: Roles, ended_by: int | None) -> Scaffold:
        """The scaffold of an observation behind a turn of the agent that ended so.

        Raises:
            TemplateError: The template does not take these roles here, changes their contents, or prints something
                else in a later turn.
        """
        scaffold = self._later.get((roles, ended_by))
        if scaffold is None:
            template = self._template
            scaffold = self._bare(roles) if template is None else self._scaffold(template, roles, ended_by, first=False)
            self._later[roles, ended_by] = scaffold
        return scaffold

    def _bare(self, roles: Roles) -> Scaffold:
        """Without a template: one piece a message, nothing around it."""
        encode = self._vocabulary.encode_first
        return Scaffold([], tuple(Piece("", ((n, ""),), None, encode, []) for n in range(len(roles))), None, None, None)

    def _scaffold(self, template: Template, roles: Roles, ended_by: int | None, *, first: bool) -> Scaffold:
        def unended(text: str) -> str:
            return text if ended_by is None else self._without_end(text, ended_by)

        def write_afresh(contents: list[str]) -> list[int]:
            contents, hidden = self._vocabulary.hide(contents)
            text = template.afresh(roles, contents, first=first)
            return self._vocabulary.encode_printed(unended(text), hidden, first=first)

        text, changes = template.opening(roles) if first else template.suffix(roles)
        head, pieces = self._vocabulary.pieces(unended(text), first=first)
        return Scaffold(head, pieces, changes if any(changes) else None, template.acts_on, write_afresh)

    def _learn(self, template: Template) -> None:
        """Find what the template does to history, how it ends turns, and whether new messages cannot be appended."""
        try:
            self.rewrites_history = template.rewrites_history()
        except TemplateError as error:
            self.rewrites_history, self._refusal = True, str(error)
        try:
            self.answer_trim = template.answer_trim()
            self._find_end_of_turn(template)
        except TemplateError as error:
            raise TemplateError(self._refusal or str(error)) from error

    def _find_end_of_turn(self, template: Template) -> None:
        """Compare what follows an answer at the end of a conversation with what follows it when a user speaks next.

        An end-of-turn token is what stands at the same place in both (it may be another token in the middle than at
        the end, as in gpt-oss); where nothing follows the last answer, the token that opens the next message ends
        the turn; else plain text does, as far as the two agree.
        """
        last = template.after_answer([QUESTION, ASKED], ask=False)
        middle = self._in_front_of("user", template)
        (last_text, at_last), (middle_text, at_middle) = self._vocabulary.lead(last), self._vocabulary.lead(middle)
        if at_last and at_middle and last_text == middle_text:
            self.text_before_end = last_text
            shared = len(_common_prefix(at_last, at_middle))
            self.end_of_turn_ids = tuple(control.token_id for control in at_last[: max(shared, 1)])
        elif text_end := "".join(_common_prefix(last_text, middle_text)):
            self.text_end = text_end
            self.end_of_turn_ids = tuple(self.encode(text_end))
        elif at_middle and not middle_text:
            self._closing = False
            self.end_of_turn_ids = (at_middle[0].token_id,)
        if self.end_of_turn_ids and not self.text_end:
            self.end_of_turn_id = self.end_of_turn_ids[-1]

    def _in_front_of(self, role: str, template: Template) -> str:
        """What is printed between an answer and the content of a message that comes next."""
        return SLOT.split(template.after_answer([QUESTION, ASKED, {"role": role, "content": slot(0)}]))[0]

    def _opens_tool_message(self, template: Template) -> int | None:
        """The token that the agent samples where a tool is to answer, in a template where openers end turns."""
        if self._closing:
            return None
        try:
            _, controls = self._vocabulary.lead(self._in_front_of("tool", template))
        except TemplateError:
            return None
        return controls[0].token_id if controls else None

    def _without_end(self, suffix: str, ended_by: int) -> str:
        """Drop the end of turn from the front of a suffix, for the agent said it already."""
        if self.text_end:
            return suffix.removeprefix(self.text_end)
        before, controls = self._vocabulary.lead(suffix)
        if not controls or before != self.text_before_end:
            return suffix
        if not self._closing and controls[0].token_id != ended_by:
            return suffix  # it opens the next message, and the agent ended its turn by another token
        edge = len(before)
        for _ in zip(controls, self.end_of_turn_ids, strict=False):
            match = self._vocabulary.pattern.match(suffix, edge)
            edge = match.end() if match else edge
        return suffix[edge:]


def _common_prefix(one: Sequence[T], other: Sequence[T]) -> list[T]:
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def _fingerprint(tokenizer: Any) -> tuple[Any, int, Any]:
    return tokenizer.chat_template, len(tokenizer), tokenizer.eos_token_id


_FORMATS: WeakKeyDictionary[PreTrainedTokenizerBase, ChatFormat] = WeakKeyDictionary()
