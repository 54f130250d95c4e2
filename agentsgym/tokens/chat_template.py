"""Find the text that a chat template renders around messages, by rendering small probe conversations."""

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
_NO_SYSTEM = 'set env_config["system_prompt"] = "", which omits the system message'
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
        # A user message absorbs the text of the system message before it; other system messages become user messages.
        "put the system message's text into the user message",
        lambda roles: tuple(
            "user" if role == "system" else role
            for role, following in zip(roles, (*roles[1:], ""), strict=True)
            if (role, following) != ("system", "user")
        ),
    ),
    ("merge consecutive messages of the same role", lambda roles: tuple(role for role, _ in groupby(roles))),
)


class Template:
    """A chat template as a function from conversations to text that raises :class:`TemplateError` for its faults."""

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = (), options: Mapping[str, Any] | None = None
    ) -> None:
        """Analyze a tokenizer's template.

        Args:
            tokenizer: The tokenizer, which is not changed.
            tools: JSON schemas of the tools, passed to each rendering.
            options: Additional template variables, passed to each rendering.
        """
        self._tokenizer = tokenizer
        self._given: dict[str, Any] = {**(options or {}), **({"tools": [*tools]} if tools else {})}
        templates: dict[str, str] | str = tokenizer.chat_template
        source = "\n".join(templates.values()) if isinstance(templates, dict) else templates
        self._has_thinking_option = "enable_thinking" in source
        self._reads_thinking = re.search(r"\bthinking\b", source) is not None
        self.frozen: dict[str, Any] = {}  # options that render with a frozen clock
        if "strftime_now" in source:
            clock = f"{{% macro strftime_now(format) %}}{ANOTHER_TIME}{{% endmacro %}}"
            self.frozen["chat_template"] = clock + tokenizer.get_chat_template(tools=self._given.get("tools"))
        self._implicit_prompt = ""  # the generation prompt that the template always adds
        self._blocks = False  # whether the template expects [{"type": "text", "text": …}] as content
        try:
            unpad(self.render(padded(("user",))), ("user",))
        except TemplateError:
            self._blocks = True
            try:
                unpad(self.render(padded(("user",))), ("user",))
            except TemplateError:
                self._blocks = False
        self._implicit_prompt = self._find_implicit_prompt()
        # The words that the template searches for in contents, in lower case. Many literals are keys and names ('text'
        # in part), which are common in contents: an identifier or a single character is included only if a rendering
        # shows that it changes the output.
        literals = [match["given"] or match["sought"] for match in _WORDS.finditer(source)]
        words = sorted({re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), text[1:-1]) for text in literals})
        acting = [
            re.escape(word.lower())
            for word in words
            if word.strip() and ((len(word) > 1 and not word.isidentifier()) or self._acts_on_word(word))
        ]
        self._words = re.compile("|".join(acting)) if acting else None

    def with_thinking(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Add reasoning as ``thinking``, too, if the template reads that, as transformers does from 5.21 on."""
        if not self._reads_thinking:
            return messages
        return [{"thinking": m["reasoning_content"], **m} if "reasoning_content" in m else m for m in messages]

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_prompt: bool = True, **options: Any) -> str:
        """Run the template, with or without the generation prompt, even if the template always adds one.

        Raises:
            TemplateError: The template raised.
        """
        conversation: Any = self.with_thinking(messages)
        if self._blocks:
            conversation = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in conversation]
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
            TemplateError: The template raised; the message shows if omitting the system message would help.
        """
        try:
            return self.render(messages, add_prompt=add_prompt)
        except TemplateError as error:
            if len(messages) < 2 or messages[0]["role"] != "system" or not works(self.render, messages[1:]):
                raise
            raise TemplateError(f"{error}; to fix it: {_NO_SYSTEM}") from error.__cause__

    def opening(self, roles: Roles) -> Printed:
        """Render the first prompt, with a sentinel for each message, and find how contents are changed.

        Raises:
            TemplateError: The template rejects these roles, changes a content, or renders the first prompt, or the text
                after the first answer, differently once the conversation continues.
        """
        return self._advise(self._opening, roles, [*plain(roles), ANSWERED, QUESTION])

    def today(self, roles: Roles) -> str:
        """Render a first prompt at the current time; empty if the template does not use the time."""
        if not self.frozen:
            return ""
        try:
            return self.render(padded(roles))
        except TemplateError:
            return ""  # `opening` reports why

    def suffix(self, roles: Roles) -> Printed:
        """Render what follows an agent's answer, given the roles of the next messages, with the generation prompt.

        Raises:
            TemplateError: The template rejects these roles at this point, omits the answer, changes a content, or
                renders different text in a later turn.
        """
        return self._advise(self._suffix, roles, [QUESTION, ANSWERED, *plain(roles), REPLY, *plain(roles, len(roles))])

    def rerender(self, roles: Roles, contents: Sequence[str], *, first: bool) -> str:
        """Render messages with these contents: as the first prompt if ``first``, otherwise after an answer.

        Raises:
            TemplateError: The template rejects the contents, or they change its output in later turns.
        """
        new = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        next_turn = [ANSWERED, *padded(("user",))]
        matches = [self._words.search(content.lower()) for content in contents] if self._words else []
        word = next((match[0] for match in matches if match), "")
        kind, cause = " + ".join(roles), repr(word) if word else "a content"
        try:
            text = self.render(new) if first else self.after_answer([QUESTION, ANSWERED, *new])
            behind = self.after_answer([*new, *next_turn] if first else [QUESTION, REPLY, *new, *next_turn])
        except TemplateError as error:
            fix = f"; to fix it: omit {word!r} from {kind}" if word else ""
            raise TemplateError(f"{error}{fix}") from error.__cause__
        if behind != self.after_answer([QUESTION, *next_turn]):
            ways = ["omit it", RERENDER] if word else [RERENDER]
            if self._has_thinking_option and word in {"/think", "/no_think"}:
                ways[0] = f'set env_config["chat_template_kwargs"] = {{"enable_thinking": {word == "/think"}}} instead'
            raise TemplateError(
                f"the chat template prints different text in later turns because of {cause} in {kind}; "
                f"to fix it: {', or '.join(ways)}"
            )
        return text

    def acts_on(self, content: str) -> bool:
        """Whether the template may treat a content specially: it is empty, or has a word that the template checks."""
        is_blank, words = not content or content.isspace(), self._words
        return is_blank or (words is not None and words.search(content.lower()) is not None)

    def after_answer(self, messages: Sequence[Mapping[str, Any]], *, add_prompt: bool = True) -> str:
        """Render what follows the agent's answer, which is :data:`ANSWER` in ``messages``."""
        return self.around_answer(messages, add_prompt=add_prompt)[1]

    def generation_prompt(self) -> str | None:
        """Find the text that the generation prompt adds after an observation; None if it changes earlier text."""
        behind = [QUESTION, ANSWERED, *padded(("user",))]
        prompted, bare = self.after_answer(behind), self.after_answer(behind, add_prompt=False)
        if not prompted.startswith(bare):  # Phi-3 adds this at the end if there is no generation prompt
            bare = bare.removesuffix(self._tokenizer.eos_token or "")
        return prompted.removeprefix(bare) if prompted.startswith(bare) else None

    def answer_trim(self) -> Change | None:
        """Find how the template trims the agent's answers; None if it does not, or changes them in other ways."""
        answer = {"role": "assistant", "content": PAD_LEFT + slot(0) + PAD_RIGHT}
        taken = take_padding(self.render([QUESTION, answer, QUESTION]), 0)
        return taken[1] if taken and taken[1] in STRIPS.values() else None

    def answer_lead(self) -> tuple[str, str]:
        """Find the text between the generation prompt and an earlier answer, such as a space or a header.

        Returns:
            The text up to and including the generation prompt, and the text between it and the answer; the latter is
            empty if it depends on the turn, or if it is reasoning, which is up to the agent.
        """
        leads: set[str] = set()
        for conversation in ([QUESTION, REPLY, QUESTION], [QUESTION]):
            prompt = self.render(conversation, **self.frozen)
            before, _ = self.around_answer([*conversation, ANSWERED, QUESTION])
            leads.add(before[len(prompt) :] if before.startswith(prompt) else "")
        lead = leads.pop()
        return prompt, lead if not leads and "think>" not in lead else ""

    def rewrites_history(self) -> bool:
        """Whether rendering a full conversation differs from the first prompt with later turns appended.

        Raises:
            TemplateError: See :meth:`opening` and :meth:`suffix`.
        """
        start, behind = (
            text.replace(slot(0), QUESTION["content"] if change is None else change(QUESTION["content"]))
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
        """Render the text before and after the agent's answer, with a frozen clock."""
        before, found, after = self.render(messages, add_prompt=add_prompt, **self.frozen).partition(ANSWER)
        if not found or ANSWER in before + after:
            raise TemplateError(
                "the chat template must render the agent's answer once and unchanged, but rendered "
                f"{(before + found + after)!r} for the answer {ANSWER!r}"
            )
        return before, after

    def _find_implicit_prompt(self) -> str:
        """Find the generation prompt that the template adds to every conversation, even if not requested.

        An answer is followed by the end of its turn, then by this prompt or by the opening of a user message. The
        opening is known from the beginning of a conversation, so the text before the opening is the end of the turn.

        Raises:
            TemplateError: The template adds a prompt that cannot be separated from the end of a turn.
        """
        user = {"role": "user", "content": slot(0)}
        try:
            prompted, bare = (self.render([user], add_prompt=add_prompt) for add_prompt in (True, False))
            before, last = self.around_answer([QUESTION, ANSWERED], add_prompt=False)
            behind = self.after_answer([QUESTION, ANSWERED, user])
        except TemplateError:
            return ""  # the error is reported when this conversation is needed
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
                "end of an answer cannot be determined: guard the prompt with {% if add_generation_prompt %}"
            )
        return prompt

    def _opening(self, roles: Roles) -> Printed:
        first = padded(roles)
        printed = unpad(self.render(first), roles)
        before, after = self.around_answer([*first, ANSWERED, *padded(("user",))])
        kind = " + ".join(roles)
        if up_to_last(before, roles) != up_to_last(self.render(first, **self.frozen), roles):
            raise TemplateError(
                f"the chat template must render a first prompt ({kind}) the same way, in the same place, after later "
                "messages are added, but it does not"
            )
        if after != self.after_answer([QUESTION, ANSWERED, *padded(("user",))]):
            raise TemplateError(
                f"the text that the chat template prints after an answer changes if the conversation begins with {kind}"
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
        if before.rpartition(QUESTION["content"])[0] != usual_before.rpartition(QUESTION["content"])[0]:
            raise TemplateError(f"the chat template prints a different first prompt when {kind} comes later")
        if usual != self.after_answer([QUESTION, REPLY, *plain(roles), ANSWERED, *padded(("user",))]):
            raise TemplateError(f"the chat template prints different text around user after an earlier {kind}")
        printed = unpad(text, roles)
        later = self.after_answer([QUESTION, ANSWERED, *new, REPLY, QUESTION])
        if not later.startswith(up_to_last(text, roles)):
            raise TemplateError(
                f"the chat template must render {kind} the same way, in the same place, after later messages are "
                "added, but it does not"
            )
        if self.frozen and ANOTHER_TIME in text:
            raise TemplateError(f"the chat template prints the time around {kind} in later turns")
        return printed

    def _advise(self, find: Callable[[Roles], Printed], roles: Roles, conversation: Messages) -> Printed:
        """Call :meth:`_opening` or :meth:`_suffix`; if it fails, add possible fixes to the error message."""
        try:
            return find(roles)
        except TemplateError as error:
            shows = False  # whether rendering the full conversation shows each message once
            with contextlib.suppress(TemplateError):
                text = self.render(conversation)
                shows = all(text.count(message["content"]) == 1 for message in conversation)
            has_system = find == self._opening and roles[0] == "system" and len(roles) > 1
            ways = [
                *self._other_roles(find, roles),
                *([_NO_SYSTEM] if has_system and works(find, roles[1:]) else []),
                *([RERENDER] if shows else []),
                OTHER_TEMPLATE,
            ]
            raise TemplateError(f"{error}; to fix it: {', or '.join(ways)}") from error.__cause__

    def _other_roles(self, find: Callable[[Roles], Printed], roles: Roles) -> list[str]:
        """Describe the smallest change of roles that makes ``find`` work; empty if there is none."""
        for size in range(1, len(_STEPS) + 1):
            for steps in combinations(_STEPS, size):
                other = roles
                for _, step in steps:
                    other = step(other)
                if other != roles and works(find, other):
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
                continue  # the template does not support one of the roles
        return False


def works(run: Callable[[T], object], given: T) -> bool:
    """Whether the template can do this."""
    try:
        run(given)
    except TemplateError:
        return False
    return True
