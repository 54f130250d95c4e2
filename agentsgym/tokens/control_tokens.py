r"""A tokenizer's control tokens, and the plain text between them.

A rendered text is cut like this::

    <|im_end|>  \n     <|im_start|>  user\nSENTINEL  <|im_end|>  \n     <|im_start|>  assistant\n
    control     piece  control       piece           control     piece  control       piece

A tokenizer encodes the text between two control tokens as one plain piece, so pieces are the unit here: a piece without
a message is encoded in advance, and a piece with a message in one call when the message arrives.

Some control tokens are found in the output of the chat template, since their tokenizer does not mark them special.
Some tokenizers (DeepSeek V3, Command R+) define their role tokens as ordinary added tokens. Text in an observation that
spells such a token would be encoded as the token, so the author of the text could forge entire turns.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from agentsgym.errors import TemplateError
from agentsgym.tokens.chat_template import Template
from agentsgym.tokens.sentinels import ANSWER, ANSWERED, QUESTION, REPLY, SLOT, STRIPS, Change, slot

PRIVATE_USE, SECOND_PRIVATE_USE = range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)

Encode = Callable[[str], list[int]]


def _escaped(mask: str) -> str:
    return json.dumps(mask).strip('"')


class Control(NamedTuple):
    """A control token: its id, and whether it absorbs the white space on its left and right."""

    token_id: int
    left: bool
    right: bool


class Piece(NamedTuple):
    """One plain piece with messages in it, and the constant ids that follow it.

    Attributes:
        before: The text up to the first message.
        fills: Index of each message to fill in, with the text after it.
        strip: Removes the white space that neighboring control tokens absorb; None if they absorb none.
        encode: Function that encodes the piece at its position.
        after: The ids up to the next piece.
    """

    before: str
    fills: tuple[tuple[int, str], ...]
    strip: Change | None
    encode: Encode
    after: list[int]


class Scaffold(NamedTuple):
    """The text and ids that the template prints around the messages of one observation.

    Attributes:
        head: Constant ids before the first piece.
        pieces: The pieces that hold messages.
        changes: The template's change of each message's content; None if it changes none.
        acts_on: Whether the template may render a content in a special way; None without a template.
        rerender: Runs the template for such contents and returns their ids.
    """

    head: list[int]
    pieces: tuple[Piece, ...]
    changes: tuple[Change | None, ...] | None
    acts_on: Callable[[str], bool] | None
    rerender: Callable[[list[str]], list[int]] | None

    def write(self, contents: list[str]) -> list[int]:
        """Return the ids of an observation with these contents.

        Raises:
            TemplateError: A content contains a word that makes the template change later turns.
        """
        head, pieces, changes, acts_on, rerender = self
        if rerender is not None and acts_on is not None:
            for content in contents:
                if acts_on(content):
                    return rerender(contents)
        if changes is not None:
            contents = [
                content if change is None else change(content)
                for change, content in zip(changes, contents, strict=True)
            ]
        token_ids = [*head]
        for before, fills, strip, encode, after in pieces:
            text = before
            for index, behind in fills:
                text += contents[index] + behind
            token_ids += encode(text if strip is None else strip(text))
            token_ids += after
        return token_ids


class Vocabulary:
    """A tokenizer's control tokens, and functions that encode and decode plain text.

    Control tokens are the tokens that ``added_tokens_decoder`` marks special (``all_special_tokens`` misses some), and
    the tokens that are passed as unmarked.
    """

    def __init__(self, tokenizer: Any, unmarked: Collection[str] = ()) -> None:
        """Read a tokenizer.

        Args:
            tokenizer: The tokenizer, which is not changed.
            unmarked: Added tokens that are control tokens although the tokenizer does not mark them special.
        """
        self.controls = {
            token.content: Control(token_id, token.lstrip, token.rstrip)
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special or token.content in unmarked
        }
        spellings = [
            (r"\s*" if control.left else "") + re.escape(name) + (r"\s*" if control.right else "")
            for name, control in sorted(self.controls.items(), key=lambda item: len(item[0]), reverse=True)
        ]
        # Excludes unmarked tokens: an answer may end with one (of a tool call) that does not end its turn.
        self.special_ids = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        # Not the length of the vocabulary, which may have holes; some tokenizers do not count added tokens.
        self.size: int = 1 + max({*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder})
        self.pattern = re.compile("|".join(spellings) or "(?!)")
        self._longest = max(map(len, self.controls), default=0)
        self._beginnings = frozenset(name[:size] for name in self.controls for size in range(1, len(name)))
        self.spelling = spelled(self.controls)
        self._revealed: dict[int, str] = {}
        self.encode_first: Encode
        self.encode: Encode
        self.decode: Callable[[Sequence[int], bool], str]
        if getattr(tokenizer, "is_fast", False):
            self._use_raw(tokenizer.backend_tokenizer.to_str(), unmarked)
        else:
            self.encode_first = self.encode = lambda text: tokenizer(
                text, add_special_tokens=False, split_special_tokens=True
            )["input_ids"]
            self.decode = lambda ids, skip: tokenizer.decode(list(ids), skip_special_tokens=skip)

    def _use_raw(self, description: str, unmarked: Collection[str]) -> None:
        """Encode with copies of the raw tokenizer that treat control tokens in text as plain text."""
        import tokenizers  # noqa: PLC0415  # at first use: importing agentsgym must stay fast

        def plain_copy(description: str) -> tuple[Any, Encode]:
            raw: Any = tokenizers.Tokenizer.from_str(description)
            raw.encode_special_tokens = True
            raw.no_truncation()
            raw.no_padding()
            return raw, lambda text: raw.encode(text, add_special_tokens=False).ids

        if unmarked:  # a raw tokenizer can treat only special tokens as text
            parsed = json.loads(description)
            for token in parsed["added_tokens"]:
                token["special"] |= token["content"] in unmarked
            description = json.dumps(parsed, ensure_ascii=False, separators=(",", ":"))
        raw, self.encode_first = plain_copy(description)
        self.decode = lambda ids, skip: raw.decode(ids, skip_special_tokens=skip)
        # Some tokenizers prepend a word marker to the first piece only, so the other pieces are encoded without it.
        inner = description.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
        self.encode = self.encode_first if inner == description else plain_copy(inner)[1]

    def lead(self, text: str) -> tuple[str, list[Control]]:
        """The plain text at the beginning of a text, and the consecutive control tokens after it."""
        plains, controls = self._cut(text)
        literals, slots = plains[0]
        empty: tuple[list[str], list[int]] = ([""], [])
        in_front = [plains[0] if slots else empty, *plains[1:]]  # before each control token, except the returned text
        row = takewhile(lambda pair: pair[0] == empty, zip(in_front, controls, strict=False))
        return literals[0], [control for _, control in row]

    def revealing(self, hidden: dict[int, str]) -> Vocabulary:
        """A copy for rendered text in which these characters also replace control tokens."""
        other = copy.copy(self)
        other._revealed = hidden
        return other

    def hide(self, contents: Sequence[str], masks: range = PRIVATE_USE) -> tuple[list[str], dict[int, str]]:
        """Replace each control token in the contents by a character that occurs in no content.

        A prefix of a control token at the end of a content is also replaced, since the next content might complete it.

        Returns:
            The contents, and the table for ``str.translate`` that restores them.
        """
        held = "".join(contents)
        unused = (mask for mask in map(chr, masks) if mask not in held and _escaped(mask) not in held)
        parts: list[tuple[str, str, str]] = []  # the text, the longest beginning of a spelling at its end, white space
        for content in contents:
            text = content.rstrip()
            tails = (text[-size:] for size in range(min(len(text), self._longest), 0, -1))
            begun = next((tail for tail in tails if tail in self._beginnings), "")
            parts.append(content.rpartition(begun) if begun else (content, "", ""))
        found = {name for text, begun, _ in parts for name in [*self.spelling.findall(text), begun]} - {""}
        mask_of = dict(zip(sorted(found), unused, strict=False))
        hidden = [
            self.spelling.sub(lambda match: mask_of[match[0]], text) + mask_of.get(begun, "") + space
            for text, begun, space in parts
        ]
        return hidden, {ord(mask): name for name, mask in mask_of.items()}

    def encode_printed(self, text: str, hidden: dict[int, str], *, first: bool = True) -> list[int]:
        """The ids of the text that a template rendered for contents from :meth:`hide`.

        Args:
            text: The rendered text.
            hidden: The table from :meth:`hide`.
            first: Whether the text begins the record.
        """
        text, hidden = self._unescaped(text, hidden)
        ids: list[int] = []
        encode, edge = self.encode_first if first else self.encode, 0
        for match in self.pattern.finditer(text):
            ids += encode(text[edge : match.start()].translate(hidden))
            ids.append(self.control_in(match).token_id)
            encode, edge = self.encode, match.end()
        return ids + encode(text[edge:].translate(hidden))

    def _unescaped(self, text: str, hidden: dict[int, str]) -> tuple[str, dict[int, str]]:
        """Undo the ASCII escapes of masks in a template's output; also return the table of all masks."""
        hidden = {**self._revealed, **hidden}
        for mask in map(chr, hidden):
            text = text.replace(_escaped(mask), mask)
        return text, hidden

    def control_in(self, match: re.Match[str]) -> Control:
        """The control token of a match of :attr:`pattern`."""
        found = match[0]
        return self.controls[found] if found in self.controls else self.controls[found.strip()]

    def pieces(
        self, text: str, *, first: bool, hidden: dict[int, str] | None = None
    ) -> tuple[list[int], tuple[Piece, ...]]:
        """Split a rendered text at its control tokens and sentinels, and encode its constant parts in advance.

        Args:
            text: The template's output, with sentinels for the contents.
            first: Whether the text begins the record.
            hidden: The table from :meth:`hide` for the rest of the output.

        Returns:
            The constant ids before the first piece, and the pieces that contain messages.
        """
        text, hidden = self._unescaped(text, hidden or {})
        plains, controls = self._cut(text)
        plains = [([literal.translate(hidden) for literal in literals], slots) for literals, slots in plains]
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
        return head, tuple(pieces)

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


_USER: dict[str, str] = {"role": "user", "content": slot(0)}
_OPENINGS: tuple[tuple[str, ...], ...] = ((), ("system",))
_OBSERVATIONS: tuple[tuple[str, ...], ...] = (("user",), ("system",), ("system", "user"), ("tool",), ("tool", "tool"))


def unmarked_controls(tokenizer: Any, template: Template) -> frozenset[str]:
    """Find every added token that the template renders around messages but the tokenizer does not mark special.

    The template renders small probe conversations. A token before an answer is included only if it is always rendered:
    ``<think>`` is rendered only in some positions, and remains a token that the agent writes. An added token with the
    same delimiters as a rendered one (``<|…|>``) is also included, since templates render some tokens only for
    structured tool calls. Words and white space are never included: they are ordinary text.
    """
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    candidates = frozenset(name for name, special in added.items() if not special and is_mark(name))
    if not candidates:
        return candidates
    printed = _around_messages(template, frozenset(added))
    marks = {_marks(name) for name in printed} - {("", "")}
    return candidates & (printed | {name for name in candidates if _marks(name) in marks})


def is_mark(name: str) -> bool:
    """Whether an added token is more than a word, white space or one character, which are common in text."""
    return len(name) > 1 and not re.fullmatch(r"[\w\s]*", name)


def spelled(names: Iterable[str]) -> re.Pattern[str]:
    """Match any of the names, the longest first; matches nothing without names."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")


def _marks(name: str) -> tuple[str, str]:
    """The marks around a name, as ``("<|", "|>")``; empty unless both have two characters."""
    found = re.fullmatch(r"([^\w\s]{2,})\b.*\b([^\w\s]{2,})", name)
    return (found[1], found[2]) if found else ("", "")


def _around_messages(template: Template, names: frozenset[str]) -> frozenset[str]:
    """Collect the tokens that a template renders around messages, except tokens that the agent writes."""
    pattern = spelled(names)
    prompted, history = _render(template, [_USER]), _render(template, [_USER], add_prompt=False)
    # Between a user message and an answer: one to come, the last one, and an earlier one.
    texts = [
        prompted,
        _render(template, [_USER, ANSWERED], add_prompt=False),
        _render(template, [_USER, ANSWERED, QUESTION, REPLY, QUESTION]),
    ]
    headers = [{*pattern.findall(text.partition(slot(0))[2].partition(ANSWER)[0])} for text in texts if text]
    always = headers[0].intersection(*headers) if headers else set[str]()
    sometimes = set[str]().union(*headers) - always
    # If one token of a pair is rendered only sometimes before an answer, the agent writes both: <think> and </think>.
    pairs = [{name, name[0] + (name[2:] if name[1:2] == "/" else f"/{name[1:]}")} for name in sometimes]
    own = set[str]().union(*(pair for pair in pairs if pair <= names))
    # The role token at the beginning of the generation prompt may differ from the one in the history.
    prompt = prompted[len(history) :] if prompted.startswith(history) else ""
    opening = pattern.match(prompt.lstrip())
    role = {opening[0]} if opening and opening[0] else set[str]()
    # An observation is followed by its own end, then by the beginning of an answer.
    apart, tails = set[str](), set[str]()
    conversations = [[*_messages(roles), _USER] for roles in _OPENINGS]
    conversations += [[_USER, ANSWERED, *_messages(roles)] for roles in _OBSERVATIONS]
    for messages in conversations:
        front, found, behind = _render(template, messages).rpartition(messages[-1]["content"])
        if found:
            first, _, rest = front.partition(slot(0))
            apart |= {*pattern.findall(first), *pattern.findall(rest.partition(ANSWER)[2])}
            tails |= {*pattern.findall(behind)}
    return frozenset((apart | always | (tails - sometimes) | role) - own)


def _render(template: Template, messages: Sequence[Mapping[str, str]], *, add_prompt: bool = True) -> str:
    try:
        return template.render(messages, add_prompt=add_prompt)
    except TemplateError:
        return ""  # the template does not support this conversation


def _messages(roles: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": slot(index)} for index, role in enumerate(roles, 1)]
