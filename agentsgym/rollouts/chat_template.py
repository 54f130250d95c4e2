"""What a chat template prints around messages, found by running it on small conversations of sentinels."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from agentsgym.errors import TemplateError

Roles = tuple[str, ...]
Strip = Callable[[str], str]
STRIPS: dict[tuple[bool, bool], Strip | None] = {
    (False, False): None,
    (True, False): str.lstrip,
    (False, True): str.rstrip,
    (True, True): str.strip,
}


ANSWER = "answer\"'&<\\>sentinel"
SLOT = re.compile(re.escape(ANSWER.replace("answer", "content")) + "(?P<slot>[0-9]+)_")
PAD_LEFT, PAD_RIGHT = "\n\n \t\v", "\v\t \n\n"
_WHAT_WOULD_DO = "set tokenizer.chat_template to one that prints every message once and unchanged, or trimmed"


def slot(index: int) -> str:
    """The sentinel of message ``index``; its quotes and brackets make a template that escapes content show itself."""
    return ANSWER.replace("answer", "content") + f"{index}_"


def _padded(roles: Roles) -> list[dict[str, str]]:
    return [{"role": role, "content": PAD_LEFT + slot(index) + PAD_RIGHT} for index, role in enumerate(roles)]


def _take_padding(text: str, index: int) -> tuple[str, Strip | None] | None:
    """Remove the padding around a sentinel, and say what the template had left of it; None if that is unclear."""
    sentinel = slot(index)
    if text.count(sentinel) != 1:
        return None
    left, right = text.split(sentinel)
    kept_left, kept_right = left.endswith(PAD_LEFT), right.startswith(PAD_RIGHT)
    if (not kept_left and left.endswith("\v")) or (not kept_right and right.startswith("\v")):
        return None
    text = left.removesuffix(PAD_LEFT) + sentinel + right.removeprefix(PAD_RIGHT)
    return text, STRIPS[not kept_left, not kept_right]


class Template:
    """A chat template as a function from conversations to text, with what it does wrong said in a sentence."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.blocks = False  # whether it wants [{"type": "text", "text": …}] for a content
        try:
            self.opening(("user",))
        except TemplateError:
            self.blocks = True
            try:
                self.opening(("user",))
            except TemplateError:
                self.blocks = False

    def render(self, messages: Sequence[dict[str, str]], *, ask: bool = True) -> str:
        """Run the template; ``ask`` adds the generation prompt.

        Raises:
            TemplateError: The template raised.
        """
        conversation: Any = messages
        if self.blocks:
            conversation = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        try:
            return self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=ask)
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateError(
                f"the chat template cannot render a conversation of {roles}: {type(error).__name__}: {error}; "
                f"leave out or merge those messages, or {_WHAT_WOULD_DO}"
            ) from error

    def opening(self, roles: Roles) -> tuple[str, tuple[Strip | None, ...]]:
        """The first prompt, with a sentinel for each message, and how contents are trimmed."""
        return self._unpad(self.render(_padded(roles)), roles)

    def suffix(self, roles: Roles) -> tuple[str, tuple[Strip | None, ...]]:
        """What follows an answer of the agent when messages of these roles come next, generation prompt included.

        Raises:
            TemplateError: The template lost the answer or a message, or prints something else in a later turn.
        """
        turn = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
        earlier = [turn[0], {"role": "assistant", "content": "reply"}]
        text = self.after_answer([*turn, *_padded(roles)])
        if text != self.after_answer([*earlier, *turn, *_padded(roles)]):
            raise TemplateError(
                f"the chat template prints something else around {' + '.join(roles)} in the second turn than in the "
                f"first, so new tokens cannot be appended; {_WHAT_WOULD_DO}"
            )
        return self._unpad(text, roles)

    def after_answer(self, messages: Sequence[dict[str, str]], *, ask: bool = True) -> str:
        """What the template prints behind the agent's answer."""
        before, found, after = self.render(messages, ask=ask).partition(ANSWER)
        if not found or ANSWER in before + after:
            raise TemplateError(
                f"the chat template must print the agent's answer once and unchanged, it printed "
                f"{(before + found + after)!r} for the answer {ANSWER!r}; {_WHAT_WOULD_DO}"
            )
        return after

    def answer_trim(self) -> Strip | None:
        """What the template does to the agent's answers; None also if it rewrites them in another way."""
        question = {"role": "user", "content": "question"}
        answer = {"role": "assistant", "content": PAD_LEFT + slot(0) + PAD_RIGHT}
        taken = _take_padding(self.render([question, answer, question]), 0)
        return taken[1] if taken else None

    def rewrites_history(self) -> bool:
        """Whether a full render of a conversation differs from the first prompt and what was appended to it."""
        question = {"role": "user", "content": slot(0)}
        start, behind = self.opening(("user",))[0], self.suffix(("user",))[0]
        for answer in ("answer", "\n answer \n", "<think>\nthought\n</think>\n\nanswer"):
            reply = {"role": "assistant", "content": answer}
            try:
                rendered = self.render([question, reply, question, reply, question])
            except TemplateError:
                return True
            if rendered != start + answer + behind + answer + behind:
                return True
        return False

    def _unpad(self, text: str, roles: Roles) -> tuple[str, tuple[Strip | None, ...]]:
        trims: list[Strip | None] = []
        for index, role in enumerate(roles):
            taken = _take_padding(text, index)
            if taken is None:
                raise TemplateError(
                    f"the chat template must print the content of each message once, unchanged or stripped of "
                    f"whitespace; of {', '.join(roles)} it lost, repeated or changed the {role} message {index}; "
                    f"{_WHAT_WOULD_DO}"
                )
            text, trim = taken
            trims.append(trim)
        return text, tuple(trims)
