"""Find the control tokens that a tokenizer does not mark special, from the output of its chat template.

Some tokenizers (DeepSeek V3, Command R+) define their role tokens as ordinary added tokens. Text in an observation that
spells such a token would be encoded as the token, so the author of the text could forge entire turns.
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
