"""Find the text that a chat template prints around messages, by running it on small conversations of sentinels."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, groupby, takewhile
from typing import Any, TypeVar

from agentsgym.errors import TemplateError
from agentsgym.texts import sentence_of, shortened, shown
from agentsgym.tokens.sentinels import (
    ANSWER,
    ANSWERED,
    PAD_LEFT,
    PAD_RIGHT,
    QUESTION,
    REPLY,
    STRIPS,
    THOUGHT,
    Change,
    Messages,
    Printed,
    Roles,
    padded,
    plain,
    slot,
    take_padding,
    unpad,
    up_to_last,
)

T = TypeVar("T")
OTHER_TEMPLATE = "set tokenizer.chat_template to one that prints every message once and unchanged, or trimmed"
RERENDER = 'set env_config["history"] = "rerender", which re-renders the whole conversation each turn'
_NO_SYSTEM = 'set env_config["system_prompt"] = "", which leaves the system message out'
ANOTHER_TIME = "another time"
_LITERAL = r"""(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""
_WORDS = re.compile(
    rf"""(?:\b(?:startswith|endswith|r?split|r?partition|replace|r?find|r?index|count|removeprefix|removesuffix)\s*\(
    |\bset\s+\w+\s*=|content\s*[!=]=)\s*(?P<given>{_LITERAL})  # content.startswith('/think'), set tag = '<think>'
    |(?P<sought>{_LITERAL})\s+(?:not\s+)?in\b  # '/think' in content""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


_STEPS: tuple[tuple[str, Callable[[Roles], Roles]], ...] = (
    (
        "send results of tools as user messages",
        lambda roles: tuple("user" if role == "tool" else role for role in roles),
    ),
    (
        # A user message after a system message takes its text; a system message alone becomes a user message.
        "put the system message's text into the user message",
        lambda roles: tuple(
            "user" if role == "system" else role
            for role, following in zip(roles, (*roles[1:], ""), strict=True)
            if (role, following) != ("system", "user")
        ),
    ),
    (
        "merge messages of one role that follow each other into one",
        lambda roles: tuple(role for role, _ in groupby(roles)),
    ),
)


class Template:
    """A chat template as a function from conversations to text, which raises :class:`TemplateError` for its faults."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Read a tokenizer's template.

        Args:
            tokenizer: The tokenizer, which is not changed.
            tools: JSON schemas that each render shows.
            options: Further variables of the template in each render.
        """
        self._tokenizer = tokenizer
        self._given: dict[str, Any] = {**(options or {}), **({"tools": [*tools]} if tools else {})}
        templates: dict[str, str] | str = tokenizer.chat_template
        source = "\n".join(templates.values()) if isinstance(templates, dict) else templates
        self.frozen: dict[str, Any] = {}  # options of renders with a frozen clock
        if "strftime_now" in source:
            clock = f"{{% macro strftime_now(format) %}}{ANOTHER_TIME}{{% endmacro %}}"
            self.frozen["chat_template"] = clock + tokenizer.get_chat_template(tools=self._given.get("tools"))
        self._implicit_prompt = ""  # the generation prompt that it always prints
        self._blocks = False  # whether it expects [{"type": "text", "text": …}] as content
        try:
            unpad(self.render(padded(("user",))), ("user",))
        except TemplateError:
            self._blocks = True
            try:
                unpad(self.render(padded(("user",))), ("user",))
            except TemplateError:
                self._blocks = False
        self._implicit_prompt = self._find_implicit_prompt()
        # The words that the template looks for in contents, in lower case. Many are keys and names ('text' in part),
        # which are common in contents: a word of letters alone, or of one character, counts only if a render shows that
        # it changes the output.
        literals = [match["given"] or match["sought"] for match in _WORDS.finditer(source)]
        words = sorted({re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), text[1:-1]) for text in literals})
        acting = [
            re.escape(word.lower())
            for word in words
            if word.strip() and ((len(word) > 1 and not word.isidentifier()) or self._acts_on_word(word))
        ]
        self._words = re.compile("|".join(acting)) if acting else None

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_prompt: bool = True, **options: Any) -> str:
        """Run the template, with or without the generation prompt, also where the template itself always adds it.

        Raises:
            TemplateError: The template raised.
        """
        conversation: Any = messages
        if self._blocks:
            conversation = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=add_prompt, **self._given, **options
            )
            return text if add_prompt else text.removesuffix(self._implicit_prompt)
        except Exception as error:
            roles = shortened(", ".join(message["role"] for message in messages), 200)
            why = f"{type(error).__name__}: {sentence_of(error)}"
            raise TemplateError(f"the chat template cannot render a conversation of {roles}: {why}") from error

    def whole(self, messages: Sequence[Mapping[str, Any]], *, add_prompt: bool) -> str:
        """Run the template over a conversation.

        Raises:
            TemplateError: The template raised; the message adds whether it would accept the rest without the system
                message.
        """
        try:
            return self.render(messages, add_prompt=add_prompt)
        except TemplateError as error:
            if len(messages) < 2 or messages[0]["role"] != "system" or not _works(self.render, messages[1:]):
                raise
            raise TemplateError(f"{error}; to fix it: {_NO_SYSTEM}") from error.__cause__

    def opening(self, roles: Roles) -> Printed:
        """Find the first prompt, with a sentinel for each message, and how contents are changed.

        Raises:
            TemplateError: The template refuses these roles, changes a content, or prints the first prompt, or what
                follows the first answer, differently once the conversation continues.
        """
        return self._advise(self._opening, roles, [*plain(roles), ANSWERED, QUESTION])

    def today(self, roles: Roles) -> str:
        """Print a first prompt as it looks at this time; empty if that is the same at all times."""
        if not self.frozen:
            return ""
        try:
            return self.render(padded(roles))
        except TemplateError:
            return ""  # `opening` reports why

    def suffix(self, roles: Roles) -> Printed:
        """Find what follows an answer of the agent when messages of these roles come next, generation prompt included.

        Raises:
            TemplateError: The template refuses these roles here, leaves the answer out, changes a content, or prints
                something else in a later turn.
        """
        return self._advise(self._suffix, roles, [QUESTION, ANSWERED, *plain(roles), REPLY, *plain(roles, len(roles))])

    def rerender(self, roles: Roles, contents: Sequence[str], *, first: bool) -> str:
        """Print messages with these contents; ``first`` as the first prompt, else after an answer.

        Raises:
            TemplateError: The template refuses the contents, or prints something else in the turns that follow.
        """
        new = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        next_turn = [ANSWERED, *padded(("user",))]
        matches = [self._words.search(content.lower()) for content in contents] if self._words else []
        word = next((match[0] for match in matches if match), "")
        kind = " + ".join(roles)
        try:
            text = self.render(new) if first else self.after_answer([QUESTION, ANSWERED, *new])
            behind = self.after_answer([*new, *next_turn] if first else [QUESTION, REPLY, *new, *next_turn])
        except TemplateError as error:
            raise TemplateError(f"{error}; to fix it: leave out {word!r} in {kind}") from error.__cause__
        if behind != self.after_answer([QUESTION, *next_turn]):
            raise TemplateError(
                f"the chat template prints different text in later turns because of {word!r} in {kind}; "
                f"to fix it: leave it out, or {RERENDER}"
            )
        return text

    def acts_on(self, content: str) -> bool:
        """Whether it may treat a content differently from others: an empty one, or one with a word it looks for."""
        has_word = self._words is not None and self._words.search(content.lower()) is not None
        return has_word or not content or content.isspace()

    def after_answer(self, messages: Sequence[Mapping[str, Any]], *, add_prompt: bool = True) -> str:
        """Print what follows the agent's answer, which is :data:`ANSWER` in ``messages``."""
        return self.around_answer(messages, add_prompt=add_prompt)[1]

    def generation_prompt(self) -> str | None:
        """Find what the generation prompt adds after an observation; None if it changes the text before it."""
        behind = [QUESTION, ANSWERED, *padded(("user",))]
        prompted, bare = self.after_answer(behind), self.after_answer(behind, add_prompt=False)
        if not prompted.startswith(bare):  # Phi-3 ends a text without a generation prompt with this
            bare = bare.removesuffix(self._tokenizer.eos_token or "")
        return prompted.removeprefix(bare) if prompted.startswith(bare) else None

    def answer_trim(self) -> Change | None:
        """Find how the template trims the agent's answers; None also if it rewrites them differently."""
        answer = {"role": "assistant", "content": PAD_LEFT + slot(0) + PAD_RIGHT}
        taken = take_padding(self.render([QUESTION, answer, QUESTION]), 0)
        return taken[1] if taken and taken[1] in STRIPS.values() else None

    def answer_lead(self) -> tuple[str, str]:
        """Find what the template prints in history between its generation prompt and an answer: a space, a header.

        Returns:
            The generation prompt, with all that precedes it, and the text after it; empty if that depends on the turn,
            or is a thought, which the agent itself writes or omits.
        """
        leads: set[str] = set()
        for conversation in ([QUESTION, REPLY, QUESTION], [QUESTION]):
            prompt = self.render(conversation, **self.frozen)
            before, _ = self.around_answer([*conversation, ANSWERED, QUESTION])
            leads.add(before[len(prompt) :] if before.startswith(prompt) else "")
        lead = leads.pop()
        return prompt, lead if not leads and "think>" not in lead else ""

    def rewrites_history(self) -> bool:
        """Whether a full render of a conversation differs from the first prompt and what was appended to it.

        Raises:
            TemplateError: See :meth:`opening` and :meth:`suffix`.
        """
        start, behind = (
            text.replace(slot(0), "question" if change is None else change("question"))
            for text, (change,) in (self.opening(("user",)), self.suffix(("user",)))
        )
        for answer in ("answer", "\n answer \n", "<think>\nthought\n</think>\n\nanswer"):
            reply = {"role": "assistant", "content": answer}
            try:
                rendered = self.render([QUESTION, reply, QUESTION, reply, QUESTION])
            except TemplateError:
                return True
            if rendered != start + answer + behind + answer + behind:
                return True
        return False

    def around_answer(self, messages: Sequence[Mapping[str, Any]], *, add_prompt: bool = True) -> tuple[str, str]:
        """Print what precedes and what follows the agent's answer, with a frozen clock."""
        before, found, after = self.render(messages, add_prompt=add_prompt, **self.frozen).partition(ANSWER)
        if not found or ANSWER in before + after:
            raise TemplateError(
                "the chat template must print the agent's answer once and unchanged, but printed "
                f"{(before + found + after)!r} for the answer {ANSWER!r}"
            )
        return before, after

    def _find_implicit_prompt(self) -> str:
        """Find the generation prompt that the template prints after every conversation, requested or not.

        An answer is followed by the end of its turn, then by this prompt or the opening of a user's message. The
        opening is known from the beginning of a conversation, so the rest before it is the end.

        Raises:
            TemplateError: It prints one, and the end of a turn cannot be separated from it.
        """
        user = {"role": "user", "content": slot(0)}
        try:
            prompted, bare = (self.render([user], add_prompt=add_prompt) for add_prompt in (True, False))
            before, last = self.around_answer([QUESTION, ANSWERED], add_prompt=False)
            behind = self.after_answer([QUESTION, ANSWERED, user])
        except TemplateError:
            return ""  # reported where it is used
        names = map(re.escape, sorted(self._tokenizer.get_added_vocab(), key=len, reverse=True))
        tokens = re.compile(f"({'|'.join(names) or '(?!)'})")
        opening, between = (tokens.split(text.partition(slot(0))[0])[::-1] for text in (bare, behind))
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(opening, between, strict=False)))
        end = "".join(between[num_same:][::-1])
        prompt = last[len(end) :] if last.startswith(end) else ""
        if prompted != bare or not prompt.strip() or not before.rstrip().endswith(prompt.rstrip()):
            return ""
        if not end:
            raise TemplateError(
                f"the chat template ends with {shown(prompt)} whether or not a generation prompt is requested, so the "
                "end of an answer cannot be distinguished: print the prompt under {% if add_generation_prompt %}"
            )
        return prompt

    def _opening(self, roles: Roles) -> Printed:
        first = padded(roles)
        printed = unpad(self.render(first), roles)
        before, after = self.around_answer([*first, ANSWERED, *padded(("user",))])
        kind = " + ".join(roles)
        if up_to_last(before, roles) != up_to_last(self.render(first, **self.frozen), roles):
            raise TemplateError(
                f"the chat template prints a first prompt of {kind} differently, or elsewhere, once the conversation "
                "continues"
            )
        if after != self.after_answer([QUESTION, ANSWERED, *padded(("user",))]):
            raise TemplateError(
                f"the chat template prints different text after an answer when the conversation begins with {kind}"
            )
        return printed

    def _suffix(self, roles: Roles) -> Printed:
        new = padded(roles)
        before, text = self.around_answer([QUESTION, ANSWERED, *new])
        kind = " + ".join(roles)
        others = {
            "in the second turn than in the first": [QUESTION, REPLY, QUESTION, ANSWERED, *new],
            f"after an earlier {kind}": [QUESTION, REPLY, *plain(roles), ANSWERED, *new],
            "after an answer with thinking": [QUESTION, THOUGHT, *new],
        }
        for place, conversation in others.items():
            if self.after_answer(conversation) != text:
                raise TemplateError(f"the chat template prints different text around {kind} {place}")
        usual_before, usual = self.around_answer([QUESTION, ANSWERED, *padded(("user",))])
        if before[: before.rfind("question")] != usual_before[: usual_before.rfind("question")]:
            raise TemplateError(f"the chat template prints a different first prompt when {kind} comes later")
        if usual != self.after_answer([QUESTION, REPLY, *plain(roles), ANSWERED, *padded(("user",))]):
            raise TemplateError(f"the chat template prints different text around user after an earlier {kind}")
        printed = unpad(text, roles)
        later = self.after_answer([QUESTION, ANSWERED, *new, REPLY, QUESTION])
        if not later.startswith(up_to_last(text, roles)):
            raise TemplateError(
                f"the chat template prints {kind} differently, or elsewhere, once the conversation continues"
            )
        if self.frozen and ANOTHER_TIME in text:
            raise TemplateError(f"the chat template prints the time around {kind} in later turns")
        return printed

    def _advise(self, find: Callable[[Roles], Printed], roles: Roles, conversation: Messages) -> Printed:
        """Call :meth:`_opening` or :meth:`_suffix`; if it fails, add to its error the alternatives that work."""
        try:
            return find(roles)
        except TemplateError as error:
            shows = False  # whether a full render has each message of the conversation in it
            with contextlib.suppress(TemplateError):
                text = self.render(conversation)
                shows = all(text.count(message["content"]) == 1 for message in conversation)
            has_system = find == self._opening and roles[0] == "system" and len(roles) > 1
            ways = [
                *self._other_roles(find, roles),
                *([_NO_SYSTEM] if has_system and _works(find, roles[1:]) else []),
                *([RERENDER] if shows else []),
                OTHER_TEMPLATE,
            ]
            raise TemplateError(f"{error}; to fix it: {', or '.join(ways)}") from error.__cause__

    def _other_roles(self, find: Callable[[Roles], Printed], roles: Roles) -> list[str]:
        """Describe the smallest change of roles with which ``find`` works; empty if none does."""
        for size in range(1, len(_STEPS) + 1):
            for steps in combinations(_STEPS, size):
                other = roles
                for _, step in steps:
                    other = step(other)
                if other != roles and _works(find, other):
                    return [" and ".join(words for words, _ in steps)]
        return []

    def _acts_on_word(self, word: str) -> bool:
        for roles in (("user",), ("system", "user"), ("user", "assistant", "tool")):
            words = plain(roles)
            try:
                expected = self.render(words)
                for message in words:
                    expected = expected.replace(message["content"], f"{word}{message['content']}{word}")
                if self.render([{**m, "content": f"{word}{m['content']}{word}"} for m in words]) != expected:
                    return True
            except TemplateError:
                continue  # not a role that the template supports
        return False


def _works(run: Callable[[T], object], given: T) -> bool:
    try:
        run(given)
    except TemplateError:
        return False
    return True
