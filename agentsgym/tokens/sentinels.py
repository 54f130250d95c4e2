"""Sentinels that replace message contents in the probe conversations for a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial

from agentsgym.errors import TemplateError

Roles = tuple[str, ...]
Change = Callable[[str], str]
Messages = list[dict[str, str]]
Printed = tuple[str, tuple[Change | None, ...]]
STRIPS: dict[tuple[bool, bool], Change | None] = {
    (False, False): None,
    (True, False): str.lstrip,
    (False, True): str.rstrip,
    (True, True): str.strip,
}

# Quotes, brackets, another script and a line break reveal a template that escapes or re-flows content.
ANSWER = "answer\"'&<\\>é\nsentinel"
SLOT = re.compile(re.escape(ANSWER.replace("answer", "content")) + "(?P<slot>[0-9]+)_")
PAD_LEFT, PAD_RIGHT = "\n\n \t\v", "\v\t \n\n"
# Not words of a default system prompt, since they are counted.
QUESTION: dict[str, str] = {"role": "user", "content": "questionsentinel"}
REPLY: dict[str, str] = {"role": "assistant", "content": "replysentinel"}
ANSWERED: dict[str, str] = {"role": "assistant", "content": ANSWER}
THOUGHT: dict[str, str] = {"role": "assistant", "content": f"<think>\nthought\n</think>\n\n{ANSWER}"}
_JSON: tuple[Change, ...] = (partial(json.dumps, ensure_ascii=False), json.dumps)


def slot(index: int) -> str:
    """The sentinel of message ``index``."""
    return f"{ANSWER.replace('answer', 'content')}{index}_"


def padded(roles: Roles) -> Messages:
    """Messages of these roles, each a sentinel surrounded by several kinds of white space."""
    return [{"role": role, "content": PAD_LEFT + slot(index) + PAD_RIGHT} for index, role in enumerate(roles)]


def plain(roles: Roles, start: int = 0) -> Messages:
    """Messages of these roles, each one word without white space; numbered from ``start``."""
    return [{"role": role, "content": f"word{index}_"} for index, role in enumerate(roles, start)]


def take_padding(text: str, index: int) -> tuple[str, Change | None] | None:
    """Remove the padding around a sentinel, and return the text and the template's change of it; None if unclear."""
    sentinel = slot(index)
    if text.count(f"sentinel{index}_") != 1:
        return None
    for change in _JSON:
        if (written := change(PAD_LEFT + sentinel + PAD_RIGHT)) in text:
            return text.replace(written, sentinel), change
    left, found, right = text.partition(sentinel)
    kept_left, kept_right = left.endswith(PAD_LEFT), right.startswith(PAD_RIGHT)
    if not found or (not kept_left and left.endswith("\v")) or (not kept_right and right.startswith("\v")):
        return None
    text = left.removesuffix(PAD_LEFT) + sentinel + right.removeprefix(PAD_RIGHT)
    return text, STRIPS[not kept_left, not kept_right]


def up_to_last(text: str, roles: Roles) -> str:
    """A text up to its last sentinel: the rest may depend on later messages, as reasoning does."""
    return text[: max(text.find(f"sentinel{index}_") for index in range(len(roles)))]


def unpad(text: str, roles: Roles) -> Printed:
    """Remove the padding of :func:`padded` messages from rendered text, and return how each content is changed."""
    changes: list[Change | None] = []
    for index, role in enumerate(roles):
        taken = take_padding(text, index)
        if taken is None:
            found = text.count(f"sentinel{index}_")
            did = "leaves out, moves or rewrites" if not found else "repeats" if found > 1 else "changes"
            raise TemplateError(
                "the chat template must render the content of every message exactly once and in order (unchanged, "
                f"stripped of whitespace, or as JSON), but in a conversation with the roles {', '.join(roles)} it "
                f"{did} the content of message {index} ({role})"
            )
        text, change = taken
        changes.append(change)
    return text, tuple(changes)
