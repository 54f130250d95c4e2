"""Learn once how a tokenizer writes a conversation: afterwards no template runs and only new text is encoded."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from agentsgym.errors import TemplateError
from agentsgym.tokens.chat_template import ANSWERED, QUESTION, SLOT, Change, Roles, Template, slot
from agentsgym.tokens.control_tokens import Piece, Scaffold, Vocabulary
from agentsgym.tokens.unmarked_controls import is_mark, unmarked_controls
from agentsgym.types import FinishReason, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENDED_BY_TEXT = -1  # stands for the id that ended a turn, where the template ends turns by plain text

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ChatFormat:
    """The format in which one tokenizer writes a conversation; get it with :meth:`of`.

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
        "_observed",
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

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, guard_added_tokens: bool = False) -> None:
        mine: Any = copy.copy(tokenizer)  # shallow: the cache in `of` must not keep its own key alive
        self._fits = _fingerprint(tokenizer)
        self._template = Template(mine) if mine.chat_template else None
        unmarked = unmarked_controls(mine, self._template) if self._template else frozenset[str]()
        self._vocabulary = self._observed = Vocabulary(mine, unmarked)
        if guard_added_tokens:
            self._observed = Vocabulary(mine, [*filter(is_mark, mine.get_added_vocab())])
        self.vocabulary_size = self._vocabulary.size
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
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, *, append: bool = True, guard_added_tokens: bool = False
    ) -> ChatFormat:
        """Get the format of a tokenizer, found at the first call and again when its template or vocabulary was changed.

        Args:
            tokenizer: Its chat template, if it has one, decides.
            append: Whether new messages are to be appended to what is recorded; False if each prompt is rendered
                anew, which takes templates that print something else in a later turn than in the first.
            guard_added_tokens: Whether the spelling of any added token stays text in what the agent is shown, also of
                one that only agents say (``<think>``, ``<tool_call>``). Words and white space are excepted; what the
                agent itself says keeps its tokens.

        Raises:
            TemplateError: The chat template does not print the messages of a plain conversation once and unchanged.
        """
        formats = _FORMATS.setdefault(tokenizer, {})
        known = formats.get(guard_added_tokens)
        if known is None or known._fits != _fingerprint(tokenizer):
            if not formats:
                _warn_if_no_template(tokenizer)
            known = formats[guard_added_tokens] = cls(tokenizer, guard_added_tokens=guard_added_tokens)
        if append and known._refusal is not None:
            raise TemplateError(known._refusal)
        return known

    def encode(self, text: str) -> list[int]:
        """Encode plain text as it stands inside a conversation; what looks like a control token stays text."""
        vocabulary = self._vocabulary
        return vocabulary.encode_first(text) if self._template is None else vocabulary.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, control tokens left out."""
        return self._vocabulary.decode(ids, True)

    def ended_by(self, ids: Sequence[int], finish_reason: FinishReason) -> int | None:
        """Find the id that ended the agent's turn; :data:`ENDED_BY_TEXT` if text did, None if nothing did.

        Args:
            ids: What the agent sampled.
            finish_reason: Where it is ``"stop"``, any token at the end that the tokenizer marks special is one that the
                agent stops at: a model may declare more of them than template and tokenizer know.
        """
        if not ids:
            return None
        ends = self._vocabulary.special_ids if finish_reason == "stop" else self.stop_token_ids
        if ids[-1] in ends or ids[-1] in self.stop_token_ids:
            return ids[-1]
        if self.text_end:
            tail = ids[-len(self.text_end.encode()) :]  # no token is shorter than a byte
            if self._vocabulary.decode(tail, False).endswith(self.text_end):
                return ENDED_BY_TEXT
        return None

    def render(self, messages: Sequence[Message], *, ask: bool = True) -> list[int]:
        """Write the exact ids of a whole conversation, rendered anew by the template with its real contents.

        Rules that look at contents apply: a template that drops old thinking drops it here. What looks like a control
        token inside a content is plain text, as everywhere; for all other text these are the ids of
        ``tokenizer.apply_chat_template``. Without a template the contents are encoded one by one.

        Args:
            messages: The conversation, answers of the agent included.
            ask: Whether to add the generation prompt.

        Raises:
            TemplateError: The template cannot render the conversation.
        """
        if self._template is None:
            encode = {True: self._vocabulary.encode_first, False: self._observed.encode_first}
            return [
                token_id
                for message in messages
                for token_id in encode[message["role"] == "assistant"](message["content"])
            ]
        contents, hidden = self._hide(messages)
        conversation = [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]
        return self._observed.encode_printed(self._template.whole(conversation, ask=ask), hidden)

    def _hide(self, messages: Sequence[Message]) -> tuple[list[str], dict[int, str]]:
        """Hide what looks like a control token, and in all but the agent's own messages what else is guarded."""
        contents = [message["content"] for message in messages]
        shown = [message["role"] != "assistant" for message in messages]
        hidden: dict[int, str] = {}
        if self._observed is not self._vocabulary:
            masked, hidden = self._observed.hide(
                [content if seen else "" for content, seen in zip(contents, shown, strict=True)]
            )
            contents = [mask if seen else own for mask, own, seen in zip(masked, contents, shown, strict=True)]
        contents, rest = self._vocabulary.hide(contents)
        return contents, hidden | rest

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
        encode = self._observed.encode_first
        return Scaffold([], tuple(Piece("", ((n, ""),), None, encode, []) for n in range(len(roles))), None, None, None)

    def _scaffold(self, template: Template, roles: Roles, ended_by: int | None, *, first: bool) -> Scaffold:
        def unended(text: str) -> str:
            return text if ended_by is None else self._without_end(text, ended_by)

        def rerender(contents: list[str]) -> list[int]:
            contents, hidden = self._observed.hide(contents)
            text = template.rerender(roles, contents, first=first)
            return self._observed.encode_printed(unended(text), hidden, first=first)

        text, changes = template.opening(roles) if first else template.suffix(roles)
        head, pieces = self._observed.pieces(unended(text), first=first)
        return Scaffold(head, pieces, changes if any(changes) else None, template.acts_on, rerender)

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
        last = template.after_answer([QUESTION, ANSWERED], ask=False)
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
        """Print what stands between an answer and the content of a message that comes next."""
        return SLOT.split(template.after_answer([QUESTION, ANSWERED, {"role": role, "content": slot(0)}]))[0]

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


def _warn_if_no_template(tokenizer: Any) -> None:
    if tokenizer.chat_template:
        return
    logger.warning(
        "the tokenizer %r has no chat template, so a conversation is recorded as the texts of its messages, one after "
        "the other, with no roles and no end of turn: set tokenizer.chat_template if the model knows one",
        tokenizer.name_or_path or type(tokenizer).__name__,
    )


# By tokenizer, and whether added tokens are guarded.
_FORMATS: WeakKeyDictionary[PreTrainedTokenizerBase, dict[bool, ChatFormat]] = WeakKeyDictionary()
