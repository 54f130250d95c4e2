"""The exact tokens of several conversations that begin alike, such as the calls of one program.

Each observation is a complete conversation, as a program sends it. If it extends one that was recorded before, with the
agent's answers as they were returned, it continues the recorded tokens. Otherwise it begins a new segment::

    call 0:  system, user                          segment 0   prompt ▏answer
    call 1:  system, user, answer 0, user          segment 0   … ▏prompt ▏answer       the end of the record: appended
    call 2:  system, another user                  segment 1   prompt ▏answer          new
    call 3:  system, user, answer 0, another user  segment 2   copy of call 0 ▏prompt ▏answer

An answer is recognized if a program serialized it differently: with white space removed around it, with reordered keys
of arguments, without its reasoning, or with other ids of its tool calls. Its sampled tokens are never encoded again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from agentsgym.errors import TemplateError
from agentsgym.tokens.chat_format import ChatFormat
from agentsgym.tokens.tool_messages import structured_calls, with_call_ids
from agentsgym.tokens.transcript import Mark, Transcript
from agentsgym.types import Action, Message, ToolCall

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    """A conversation up to one of the agent's answers.

    Attributes:
        turn: Index of the answer among all answers.
        start, stop: The conversation's tokens in the record.
        prompt_length: Number of tokens of its first prompt.
        num_messages: Number of its messages, the answer included.
        ended_by: What ended the answer (see ``ChatFormat.ended_by``).
        calls: The tool calls of the answer, and their messages' form.
    """

    turn: int
    start: int
    stop: int
    prompt_length: int
    num_messages: int
    ended_by: int | None
    calls: tuple[Sequence[ToolCall], Sequence[Mapping[str, Any]]]


class BranchingTranscript(Transcript):
    """Records conversations that share a beginning: ``observe`` or ``observe_text``, ``act``, and so on.

    Attributes:
        parent: Index of the answer that the last observation continues; None if it began a new conversation.
        prompt_length: Number of tokens of the first prompt of the last observation's conversation.
        returned: The last answer as it is returned to the program.
    """

    def __init__(self, format_of: Callable[[Tools], ChatFormat | None], tokenizer: Any = None) -> None:
        """Begin without conversations.

        Args:
            format_of: Returns the chat format with these tools; None without a tokenizer.
            tokenizer: The tokenizer, for prompts that are text; None to record messages only.
        """
        super().__init__(None)
        self.prompt_messages = []
        self.parent: int | None = None
        self.returned: Message = {"role": "assistant", "content": ""}
        self._format_of, self._tokenizer = format_of, tokenizer
        self._answered: dict[bytes, _Answered] = {}
        self._answered_texts: list[tuple[str, _Answered]] = []
        self._digest: bytes | None = None  # of the observed conversation; None if it is text
        self._text = ""  # the observed text
        self._num_turns = 0

    def observe(self, messages: Sequence[Message], tools: Tools = ()) -> None:
        """Record a complete conversation, tokenizing only what is new in it.

        Args:
            messages: The conversation, including the agent's answers in it.
            tools: JSON schemas of the tools of this observation; with other tools, a conversation is another one.

        Raises:
            TemplateError: The chat template does not allow these messages.
            RuntimeError: The last observation is still waiting for its action.
        """
        mark = self._new_mark()
        # Of each beginning of the conversation, from its first message to all of them.
        _, *digests = accumulate(messages, _digest, initial=_hash(_canonical([*tools]) if tools else ""))
        chat_format = self._format_of(tools)
        found = next((self._answered[one] for one in reversed(digests[:-1]) if one in self._answered), None)
        new = None if found is None else self._continuation(chat_format, found, messages[found.num_messages :])
        if new is None:
            found, new = None, prompt_ids(chat_format, messages)
        self._write(mark, found, new, messages, 0 if found is None else found.num_messages)
        self.chat_format, self._digest = chat_format, digests[-1]

    def observe_text(self, prompt: str | Sequence[int]) -> None:
        """Record a prompt that is not a conversation but text or token ids, in which control tokens are control tokens.

        Raises:
            TemplateError: It has token ids, but there is no tokenizer; or it is empty.
            RuntimeError: The last observation is still waiting for its action.
        """
        mark = self._new_mark()
        if not prompt:
            raise TemplateError("the prompt is empty")
        if not isinstance(prompt, str) and self._tokenizer is None:
            raise TemplateError("a prompt of token ids requires a tokenizer")
        self._text = prompt if isinstance(prompt, str) else self._decoded(prompt)
        candidates = ((one, self._rest(text, one, prompt)) for text, one in reversed(self._answered_texts))
        found, new = next(((one, rest) for one, rest in candidates if rest is not None), (None, None))
        if new is None:
            new = self._encoded(prompt, is_first=True) if isinstance(prompt, str) else [*prompt]
        self._write(mark, found, new, [Message(role="user", content=self._text)], 0)
        self.chat_format, self._digest = self._format_of(()), None

    def act(self, action: Action, limit: int | None = None) -> tuple[int, int]:
        """Append the agent's answer: see ``Transcript.act``."""
        calls = structured_calls(action.tool_calls, self._num_calls)
        start, stop = super().act(action, limit)
        self.returned = {"role": "assistant", "content": self.messages[-1]["content"] if self.was_cut else action.text}
        if calls and not self.was_cut:
            self.returned["tool_calls"] = calls
        answered = _Answered(
            turn=self._num_turns,
            start=self.segment_start,
            stop=stop,
            prompt_length=self.prompt_length,
            num_messages=len(self.prompt_messages),
            ended_by=self._ended_by,
            calls=(self._calls, calls),
        )
        if self._digest is None:
            ids = [*(action.token_ids or ())]
            if len(ids) > 1 and ids[-1] == self._ended_by:
                # Clients receive the text without its end token, so a prompt that extends it continues such a copy.
                open_end = dataclasses.replace(answered, stop=stop - 1)
                self._answered_texts.append((self._text + self._decoded(ids[:-1]), open_end))
            self._answered_texts.append((self._text + self._decoded(ids), answered))
        else:
            self._answered[_digest(self._digest, self.returned)] = answered
        self._num_turns += 1
        return start, stop

    def _tokens(self, answered: _Answered) -> list[int]:
        start = self.segment_start
        if answered.start == start:
            return self.token_ids[: answered.stop - start]
        return self._earlier[answered.start : answered.stop]

    def _continuation(
        self, chat_format: ChatFormat | None, answered: _Answered, new: Sequence[Message]
    ) -> list[int] | None:
        """The tokens that new messages add after an answer; None if the template cannot append them."""
        if chat_format is None:
            return []
        try:
            labeled = with_call_ids(new, *answered.calls) if any(one["role"] == "tool" for one in new) else new
            return chat_format.observation(labeled, answered.ended_by)
        except TemplateError:
            return None

    def _write(
        self, mark: Mark, found: _Answered | None, new: list[int], messages: Sequence[Message], num_known: int
    ) -> None:
        self._mark = mark
        is_appended = found is not None and found.stop == len(self._earlier) + len(self.token_ids)
        if not is_appended:
            before = [] if found is None else self._tokens(found)
            self._earlier += self.token_ids
            self.token_ids = before
        self.token_ids += new
        self.parent = None if found is None else found.turn
        self.prompt_length = len(self.token_ids) if found is None else found.prompt_length
        self.messages += messages[num_known:]
        self.prompt_messages = [*messages]

    def _rest(self, text: str, answered: _Answered, prompt: str | Sequence[int]) -> list[int] | None:
        """The tokens of a prompt after a recorded one and its answer; None if it does not begin with them."""
        if isinstance(prompt, str):
            is_longer = len(prompt) > len(text) and prompt.startswith(text)
            return self._encoded(prompt[len(text) :], is_first=False) if is_longer else None
        known = self._tokens(answered)
        return [*prompt[len(known) :]] if len(prompt) > len(known) and [*prompt[: len(known)]] == known else None

    def _encoded(self, text: str, *, is_first: bool) -> list[int]:
        return [] if self._tokenizer is None else self._tokenizer(text, add_special_tokens=is_first)["input_ids"]

    def _decoded(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode([*token_ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def prompt_ids(chat_format: ChatFormat | None, messages: Sequence[Message]) -> list[int]:
    """Return the ids of a conversation of which nothing is recorded; none without a format."""
    if chat_format is None:
        return []
    if any(message["role"] in {"assistant", "tool"} for message in messages):
        return chat_format.render(messages)
    return chat_format.observation(messages, None, is_first=True)


def _digest(before: bytes, message: Message) -> bytes:
    """The digest of a conversation and one more message."""
    role, content, called = message["role"], message["content"], message.get("tool_calls")
    content = content.strip() if role == "assistant" else content
    if not called:
        return _hash(f"{len(role)} {role}{content}", before)
    calls = [[call["function"]["name"], _parsed(call["function"]["arguments"])] for call in called]
    return _hash(_canonical([role, content, calls]), before)


def _parsed(arguments: Any) -> Any:
    """Arguments as a value, which a program may have sent as a text of JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _hash(text: str, before: bytes = b"") -> bytes:
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()
