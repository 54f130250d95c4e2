r"""How a tokenizer writes a conversation, found once: afterwards no template runs and only new text is encoded.

A chat template is a program; it is run on a small conversation whose contents are sentinels, and its output is cut::

    <|im_end|>  \n     <|im_start|>  user\nSENTINEL  <|im_end|>  \n     <|im_start|>  assistant\n
    control     piece  control       piece           control     piece  control       piece

A tokenizer encodes what stands between two control tokens as one plain piece, so that is the unit here: a piece
without a message in it is encoded ahead, one with a message when the message comes, in one call.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from agentsgym.rollouts.chat_template import ANSWER, SLOT, STRIPS, Roles, Strip, Template
from agentsgym.types import FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENDED_BY_TEXT = -1  # stands for the id that ended a turn, where the template ends turns by plain text

Encode = Callable[[str], list[int]]
T = TypeVar("T")


class Control(NamedTuple):
    """A control token: its id, and whether it swallows the whitespace on its left and right."""

    token_id: int
    left: bool
    right: bool


class Piece(NamedTuple):
    """One plain piece with messages in it, and the constant ids that follow it.

    Attributes:
        before: Its text up to the first message.
        fills: Which message comes next and the text behind it.
        strip: What neighbouring control tokens swallow of it.
        encode: Encodes it where it stands.
        after: The ids up to the next piece.
    """

    before: str
    fills: tuple[tuple[int, str], ...]
    strip: Strip | None
    encode: Encode
    after: list[int]


class Scaffold(NamedTuple):
    """What the template prints around the messages of one observation.

    Attributes:
        head: Constant ids in front.
        pieces: The pieces that hold messages.
        trims: What the template does to each message's content; None if it takes all of them as they are.
    """

    head: list[int]
    pieces: tuple[Piece, ...]
    trims: tuple[Strip | None, ...] | None

    def write(self, contents: list[str], token_ids: list[int]) -> None:
        """Append the ids of an observation with these contents."""
        if self.trims is not None:
            contents = [
                content if trim is None else trim(content) for trim, content in zip(self.trims, contents, strict=True)
            ]
        token_ids += self.head
        for before, fills, strip, encode, after in self.pieces:
            text = before
            for index, behind in fills:
                text += contents[index] + behind
            token_ids += encode(text if strip is None else strip(text))
            token_ids += after


class Vocabulary:
    """A tokenizer's control tokens, and plain text to ids and back.

    Control tokens are those that ``added_tokens_decoder`` marks special (``all_special_tokens`` misses some).
    """

    def __init__(self, tokenizer: Any) -> None:
        self.controls = {
            token.content: Control(token_id, token.lstrip, token.rstrip)
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        spellings = [
            (r"\s*" if control.left else "") + re.escape(name) + (r"\s*" if control.right else "")
            for name, control in sorted(self.controls.items(), key=lambda item: len(item[0]), reverse=True)
        ]
        self.control_ids = frozenset(control.token_id for control in self.controls.values())
        # Not its length: a vocabulary may have holes, and some tokenizers do not count their added tokens.
        self.size: int = 1 + max({*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder})
        self.pattern = re.compile("|".join(spellings) or "(?!)")
        if getattr(tokenizer, "is_fast", False):
            self._use_raw(tokenizer.backend_tokenizer)
        else:
            self._use_slow(tokenizer)

    def _use_raw(self, original: Any) -> None:
        """Encode with copies of the raw tokenizer that see control-looking text as text."""
        import tokenizers  # noqa: PLC0415  # at first use: importing agentsgym must stay light

        def plain_copy(description: str) -> tuple[Any, Encode]:
            raw: Any = tokenizers.Tokenizer.from_str(description)
            raw.encode_special_tokens = True
            raw.no_truncation()
            raw.no_padding()
            return raw, lambda text: raw.encode(text, add_special_tokens=False).ids

        description: str = original.to_str()
        raw, self.encode_first = plain_copy(description)
        self.decode: Callable[[Sequence[int], bool], str] = lambda ids, skip: raw.decode(ids, skip_special_tokens=skip)
        # Some tokenizers put a word mark before the very first piece only; every other piece must do without.
        inner = description.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
        self.encode = self.encode_first if inner == description else plain_copy(inner)[1]

    def _use_slow(self, tokenizer: Any) -> None:
        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

        self.encode_first = self.encode = encode
        self.decode = lambda ids, skip: tokenizer.decode(list(ids), skip_special_tokens=skip)

    def lead(self, text: str) -> tuple[str, list[Control]]:
        """The plain text that a text begins with, and the control tokens that stand in a row behind it."""
        plains, controls = self._cut(text)
        literals, slots = plains[0]
        empty: tuple[list[str], list[int]] = ([""], [])
        in_front = [plains[0] if slots else empty, *plains[1:]]  # of each control token; the text returned aside
        row = takewhile(lambda pair: pair[0] == empty, zip(in_front, controls, strict=False))
        return literals[0], [control for _, control in row]

    def control_in(self, match: re.Match[str]) -> Control:
        """The control token that :attr:`pattern` found."""
        found = match[0]
        return self.controls[found] if found in self.controls else self.controls[found.strip()]

    def scaffold(self, text: str, trims: tuple[Strip | None, ...], *, first: bool) -> Scaffold:
        """Cut a rendered text at its control tokens and sentinels, and encode ahead what is constant.

        Args:
            text: What the template printed, with the sentinels of ``trims`` in it.
            trims: For each message what the template does to its content.
            first: Whether the text begins the record.
        """
        plains, controls = self._cut(text)
        head: list[int] = []
        pieces: list[Piece] = []
        constant = head
        for n, (literals, slots) in enumerate(plains):
            encode = self.encode_first if first and n == 0 else self.encode
            if slots:
                strip = STRIPS[n > 0 and controls[n - 1].right, n < len(controls) and controls[n].left]
                constant = []
                pieces.append(Piece(literals[0], tuple(zip(slots, literals[1:], strict=True)), strip, encode, constant))
            else:
                constant += encode(literals[0])
            if n < len(controls):
                constant.append(controls[n].token_id)
        return Scaffold(head, tuple(pieces), trims if any(trims) else None)

    def _cut(self, text: str) -> tuple[list[tuple[list[str], list[int]]], list[Control]]:
        """Split a text into plain pieces (literals and the sentinels between them) and the controls between those."""
        plains: list[tuple[list[str], list[int]]] = [([""], [])]
        controls: list[Control] = []
        edge = 0
        for match in re.finditer(f"{SLOT.pattern}|{self.pattern.pattern}", text):
            literals, slots = plains[-1]
            literals[-1] += text[edge : match.start()]
            edge = match.end()
            if match["slot"] is None:
                controls.append(self.control_in(match))
                plains.append(([""], []))
            else:
                slots.append(int(match["slot"]))
                literals.append("")
        plains[-1][0][-1] += text[edge:]
        return plains, controls


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
        self._first: dict[Roles, Scaffold] = {}
        self._later: dict[tuple[Roles, int | None], Scaffold] = {}
        self.end_of_turn_id: int | None = None
        self.end_of_turn_ids: tuple[int, ...] = ()
        self.text_before_end = ""
        self._closing = True  # False: the token that opens the next message ends the turn
        self.text_end = ""
        self.rewrites_history = False
        self.answer_trim: Strip | None = None
        if self._template is not None:
            self.answer_trim = self._template.answer_trim()
            self.rewrites_history = self._template.rewrites_history()
            self._find_end_of_turn(self._template)
        stops = (self.end_of_turn_id, mine.eos_token_id)
        self.stop_token_ids = frozenset(token_id for token_id in stops if token_id is not None)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
        """The format of a tokenizer, found at the first call and again when its template or vocabulary was changed.

        Raises:
            TemplateError: The chat template does not print the messages of a plain conversation once and unchanged.
        """
        known = _FORMATS.get(tokenizer)
        if known is None or known._fits != _fingerprint(tokenizer):
            known = _FORMATS[tokenizer] = cls(tokenizer)
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

    def first(self, roles: Roles) -> Scaffold:
        """The scaffold of a conversation's first prompt.

        Raises:
            TemplateError: The template does not take these roles, or changes their contents.
        """
        scaffold = self._first.get(roles)
        if scaffold is None:
            scaffold = self._bare(roles) if self._template is None else self._opening(self._template, roles)
            self._first[roles] = scaffold
        return scaffold

    def later(self, roles: Roles, ended_by: int | None) -> Scaffold:
        """The scaffold of an observation behind a turn of the agent that ended so.

        Raises:
            TemplateError: As :meth:`first`.
        """
        scaffold = self._later.get((roles, ended_by))
        if scaffold is None:
            if self._template is None:
                scaffold = self._bare(roles)
            else:
                text, trims = self._template.suffix(roles)
                if ended_by is not None:
                    text = self._without_end(text, ended_by)
                scaffold = self._vocabulary.scaffold(text, trims, first=False)
            self._later[roles, ended_by] = scaffold
        return scaffold

    def _bare(self, roles: Roles) -> Scaffold:
        """Without a template: one piece a message, nothing around it."""
        encode = self._vocabulary.encode_first
        return Scaffold([], tuple(Piece("", ((n, ""),), None, encode, []) for n in range(len(roles))), None)

    def _opening(self, template: Template, roles: Roles) -> Scaffold:
        text, trims = template.opening(roles)
        return self._vocabulary.scaffold(text, trims, first=True)

    def _find_end_of_turn(self, template: Template) -> None:
        """Compare what follows an answer at the end of a conversation with what follows it when a user speaks next.

        An end-of-turn token is what stands at the same place in both (it may be another token in the middle than at
        the end, as in gpt-oss); where nothing follows the last answer, the token that opens the next message ends
        the turn; else plain text does, as far as the two agree.
        """
        turn = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
        last = template.after_answer(turn, ask=False)
        middle = SLOT.split(template.suffix(("user",))[0])[0]
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
