"""Find the control tokens that a tokenizer does not mark special, by what its chat template prints.

Some tokenizers (DeepSeek V3, Command R+) add their role tokens as ordinary added tokens. Typed into an observation,
such a spelling would become the real token, and its author could forge whole turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentsgym.errors import TemplateError
from agentsgym.tokens.chat_template import Template
from agentsgym.tokens.sentinels import ANSWER, ANSWERED, QUESTION, REPLY, slot

_USER: dict[str, str] = {"role": "user", "content": slot(0)}
_OPENINGS: tuple[tuple[str, ...], ...] = ((), ("system",))
_OBSERVATIONS: tuple[tuple[str, ...], ...] = (("user",), ("system",), ("system", "user"), ("tool",), ("tool", "tool"))


def unmarked_controls(tokenizer: Any, template: Template) -> frozenset[str]:
    """Find every added token that the template prints around messages, although the tokenizer does not mark it special.

    The template is run on small conversations. What it prints before an answer counts only if it does so each
    time: ``<think>`` stands there in some places only, and stays a token that the agent writes. An added token between
    the same marks as one that is printed (``<|…|>``) counts too, since templates print some of theirs only for
    structured tool calls. Words and white space never count: they are ordinary text.

    Args:
        tokenizer: A tokenizer.
        template: Its chat template.
    """
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    candidates = frozenset(name for name, special in added.items() if not special and is_mark(name))
    if not candidates:
        return candidates
    printed = _Probe(template, added).around_messages()
    marks = {_marks(name) for name in printed} - {("", "")}
    return candidates & (printed | {name for name in candidates if _marks(name) in marks})


def is_mark(name: str) -> bool:
    """Whether an added token is more than a word, white space or one character, which text is full of."""
    return len(name) > 1 and not re.fullmatch(r"[\w\s]*", name)


def spelled(names: Iterable[str]) -> re.Pattern[str]:
    """Match any of the names, the longest first; matches nothing without names."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")


def _marks(name: str) -> tuple[str, str]:
    """Read the marks that a name stands between, as ``("<|", "|>")``; empty unless both have two characters."""
    found = re.fullmatch(r"([^\w\s]{2,})\b.*\b([^\w\s]{2,})", name)
    return (found[1], found[2]) if found else ("", "")


def _partner(name: str) -> str:
    """The closing mark of an opening one, and the other way round: ``<think>`` and ``</think>``."""
    return name[0] + (name[2:] if name[1:2] == "/" else f"/{name[1:]}")


class _Probe:
    """Collects the added tokens that a template prints in small conversations."""

    def __init__(self, template: Template, names: Iterable[str]) -> None:
        self._template = template
        self._names = frozenset(names)
        self._pattern = spelled(self._names)

    def around_messages(self) -> frozenset[str]:
        """Collect what is printed around messages, the agent's own marks left out."""
        headers = [self._tokens(text) for text in self._headers()]
        apart, tails = self._around_observations()
        always = headers[0].intersection(*headers) if headers else frozenset[str]()
        sometimes = frozenset[str]().union(*headers) - always
        # A pair of which one is printed only sometimes before an answer is the agent's: <think> and </think>.
        pairs = [{name, _partner(name)} for name in sometimes]
        own = frozenset[str]().union(*(pair for pair in pairs if pair <= self._names))
        # An observation is followed by its own end, then by the beginning of an answer.
        return (apart | always | (tails - sometimes) | self._reply_opening()) - own

    def _headers(self) -> list[str]:
        """Print the text between a user message and an answer: one to come, the last one, and an earlier one."""
        texts = [
            self._render([_USER]),
            self._render([_USER, ANSWERED], add_prompt=False),
            self._render([_USER, ANSWERED, QUESTION, REPLY, QUESTION]),
        ]
        return [text.partition(slot(0))[2].partition(ANSWER)[0] for text in texts if text]

    def _reply_opening(self) -> frozenset[str]:
        """Find the role token that begins the generation prompt: it may be another one than in history."""
        history, asked = self._render([_USER], add_prompt=False), self._render([_USER])
        prompt = asked[len(history) :] if asked.startswith(history) else ""
        found = self._pattern.match(prompt.lstrip())
        return frozenset({found[0]} if found and found[0] else ())

    def _around_observations(self) -> tuple[frozenset[str], frozenset[str]]:
        """Collect what precedes, separates and follows the messages."""
        apart, tails = frozenset[str](), frozenset[str]()
        conversations = [[*_messages(roles), _USER] for roles in _OPENINGS]
        conversations += [[_USER, ANSWERED, *_messages(roles)] for roles in _OBSERVATIONS]
        for messages in conversations:
            text = self._render(messages)
            front, found, behind = text.rpartition(messages[-1]["content"])
            if found:
                first, _, rest = front.partition(slot(0))
                apart |= self._tokens(first) | self._tokens(rest.partition(ANSWER)[2])
                tails |= self._tokens(behind)
        return apart, tails

    def _render(self, messages: Sequence[Mapping[str, str]], *, add_prompt: bool = True) -> str:
        try:
            return self._template.render(messages, add_prompt=add_prompt)
        except TemplateError:
            return ""  # not a shape that it takes

    def _tokens(self, text: str) -> frozenset[str]:
        return frozenset(self._pattern.findall(text))


def _messages(roles: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": slot(index)} for index, role in enumerate(roles, 1)]
