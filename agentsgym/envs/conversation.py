"""Record one conversation, within a token budget.

A long history can be replaced by a note that the agent writes, and that is trained like any other turn::

    first prompt ▏turn ▏turn ▏turn ▏"Write a note…" ▏note      history exceeds summarize_over_tokens
    first prompt ▏note ▏new observation ▏turn ▏turn …           a new segment
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

from agentsgym.credit.components import Reward
from agentsgym.envs.boundary import as_hashable, as_messages, call_environment
from agentsgym.envs.contract import PlayableEnv, State
from agentsgym.errors import TemplateError, did_you_mean
from agentsgym.fields import is_int, or_none, require
from agentsgym.tokens.transcript import ChatFormat, History, Transcript
from agentsgym.types import Message, ToolCall, Turn

logger = logging.getLogger(__name__)

SUMMARIZE: Final = "summarize"
LAST: Final = "last"
VIEWS: Final = "views"
"""Values of ``env_config["history"]``: notes, the last turns, separate conversations of the roles the agent plays."""

DEFAULT_PROMPT: Final = (
    "Write a note of everything that matters for the rest of this conversation. You will see the note and the first "
    "message, and nothing else of what was said so far."
)


class NotedHistory:
    """The history of one conversation, as a function from messages to messages (see ``Transcript``).

    Attributes:
        limit: Number of tokens above which a note is requested.
        prompt: The request.
        note_turns: Indices of the turns in which notes were written.
    """

    def __init__(self, limit: int, prompt: str) -> None:
        self.limit, self.prompt = limit, prompt
        self.note_turns: list[int] = []
        self._is_written = False

    def is_due(self, transcript: Transcript, num_turns: int) -> bool:
        """Whether the prompt is too long; never before the first turn or directly after a note, which cannot help then.

        Without a tokenizer, four characters count as a token.
        """
        size = len(transcript.token_ids)
        if not size:
            size = sum(len(message["content"]) for message in transcript.prompt_messages) // 4
        return size > self.limit and num_turns > (self.note_turns[-1] + 1 if self.note_turns else 0)

    def written(self, turn: int) -> None:
        """Replace the history from the next prompt on by the note that was just written in a turn."""
        self.note_turns.append(turn)
        self._is_written = True

    def __call__(self, messages: list[Message]) -> list[Message]:
        """Keep the system message, the first message and the note of earlier messages, if a note was just written."""
        if not self._is_written:
            return messages
        self._is_written = False
        note = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
        first = next((place for place, message in enumerate(messages) if message["role"] != "system"), 0)
        return [*messages[: first + 1], messages[note], *messages[note + 1 :]]


class LastTurns:
    """The first observation and the last turns of one conversation, as a function from messages to messages.

    A turn is an answer and what the environment returned to it, so results stay with the calls that they belong to. If
    episodes share the conversation, the first observation is that of the episode in which the oldest turn was played.
    """

    def __init__(self, num_turns: int | None) -> None:
        """Begin a conversation; None for nine turns."""
        # Each turn follows the opening of its episode: the system message and the first observation.
        self._turns: deque[tuple[list[Message], list[Message]]] = deque(maxlen=num_turns or 9)
        self._opening: list[Message] = []
        self._next_opening: list[Message] = []
        self._num_shown = 0

    def begin_episode(self, messages: Sequence[Message]) -> None:
        """Set the first observation of a further episode, before it is shown; that of the first is what is shown."""
        system = [message for message in self._opening[:1] if message["role"] == "system"]
        self._next_opening = [*system, *messages]

    def __call__(self, messages: list[Message]) -> list[Message]:
        """Keep the last turns, after the opening of the oldest one's episode."""
        if self._num_shown:
            self._turns.append((self._opening, messages[self._num_shown :]))
            opening, _ = self._turns[0]
            messages = [*opening, *chain.from_iterable(turn for _, turn in self._turns)]
        else:
            self._next_opening = messages
        self._opening, self._num_shown = self._next_opening, len(messages)
        return messages


class Views:
    """The conversations of an agent that plays every role; each prompt is the one of the role that moves.

    An instance is the history of the record: a function from the recorded messages to those that the agent sees.
    """

    def __init__(self) -> None:
        self._by_role: dict[Hashable, list[Message]] = {}
        self._current: list[Message] = []

    def observe(self, env: PlayableEnv, state: State, *, is_first: bool) -> list[Message]:
        """Return the conversation of the role that moves, with its new observation; the first of an episode is new."""
        if is_first:
            self._by_role = {}
        role = as_hashable("_role", call_environment(env._role, state))  # pyright: ignore[reportPrivateUsage]
        self._current = self._by_role.setdefault(role, [])
        step = sum(message["role"] == "assistant" for message in self._current)
        self._current += as_messages(call_environment(env._format_prompt, state, step))  # pyright: ignore[reportPrivateUsage]
        return [*self._current]

    def act(self, text: str) -> None:
        """Add an answer to the conversation of the role that moved."""
        self._current.append(Message(role="assistant", content=text))

    def __call__(self, messages: list[Message]) -> list[Message]:
        """Return the system message, and the conversation of the role that moves, which was recorded last."""
        system = [message for message in messages[:1] if message["role"] == "system"]
        return [*system, *messages[-len(self._current) :]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The token limits of a rollout; None for no limit.

    Attributes:
        trajectory: All tokens, including prompts.
        completion: Everything after the first prompt, observations included.
        turn: One action.
        context: A prompt and its answer, in the agent's context.
    """

    trajectory: int | None = None
    completion: int | None = None
    turn: int | None = None
    context: int | None = None

    def __post_init__(self) -> None:
        for name in ("trajectory", "completion", "turn", "context"):
            limit = getattr(self, name)
            require(f"the token budget of a {name}", limit, or_none(is_int(1)), "a positive int or None")

    def room(self, *, length: int, prompt_length: int) -> int | None:
        """The maximum number of tokens of the next action; None for no limit.

        Args:
            length: Tokens so far, including the first prompt; after a history rewrite, tokens of the current prompt.
            prompt_length: Tokens of the first prompt.

        >>> Budget(trajectory=100, turn=30).room(length=80, prompt_length=10)
        20
        >>> Budget().room(length=80, prompt_length=10) is None
        True
        """
        room = self.turn
        if self.trajectory is not None and (room is None or room > self.trajectory - length):
            room = self.trajectory - length
        if self.completion is not None:
            rest = self.completion - max(0, length - prompt_length)
            room = rest if room is None else min(room, rest)
        if self.context is not None and (room is not None or length >= self.context):  # otherwise, the agent's limits
            room = self.context - length if room is None else min(room, self.context - length)
        return room


class Conversation:
    """The record of one conversation: its tokens, its turns and their rewards."""

    def __init__(self, chat_format: ChatFormat | None, history: History) -> None:
        self.transcript = Transcript(chat_format, history)
        self.notes = history if isinstance(history, NotedHistory) else None
        self.turns: list[Turn] = []
        self.logprobs: list[Sequence[float] | None] = []
        self.agent_state: Any = None
        self.final_reward = 0.0
        self.final_parts: list[Reward] = []  # of each episode, except practice ones and those with rewards by role
        self.info: dict[str, Any] = {}
        self.has_tools = False
        self.num_calls: Counter[str] = Counter()  # "parsed", "unreadable", and those with a repair, by its kind
        self.last_messages: list[Message] = []  # final messages of the last episode, until they are recorded

    def count(self, calls: Sequence[ToolCall]) -> None:
        """Count the tool calls of an answer."""
        for call in calls:
            self.num_calls["unreadable" if call.error is not None else call.repair or "parsed"] += 1

    def last_turn(self) -> int:
        """The index of the last turn that is not a note."""
        notes = () if self.notes is None else self.notes.note_turns
        return max(k for k in range(len(self.turns)) if k not in notes)

    def token_ids(self) -> list[int]:
        """Return the recorded ids, (T,), excluding a rewritten prompt without an answer, to which no turn refers."""
        token_ids = self.transcript.record()
        if self.turns and self.transcript.segment_start > self.turns[-1].prompt_start:
            return token_ids[: self.turns[-1].stop]
        return token_ids

    def token_logprobs(self, num_tokens: int) -> list[float] | None:
        """Return the log-probabilities of the first tokens, 0.0 for environment tokens; None if an action has none."""
        values = [0.0] * num_tokens
        # Not strict: the last action is recorded before its turn.
        for turn, logprobs in zip(self.turns, self.logprobs, strict=False):
            if turn.start == turn.stop:
                continue  # no message, or no tokenizer to record it with
            if logprobs is None:
                return None
            values[turn.start : turn.stop] = logprobs
        return values[:num_tokens]

    def with_last_messages(self, prompt: list[Message]) -> list[Message]:
        """Prepend the previous episode's final messages to the next first prompt, merging adjacent user messages."""
        last = self.last_messages
        if not last:
            return prompt
        if last[-1]["role"] != "user" or prompt[0]["role"] != "user":
            return [*last, *prompt]
        text = f"{last[-1]['content']}\n\n{prompt[0]['content']}"
        return [*last[:-1], {**prompt[0], "content": text}, *prompt[1:]]

    def close(self, budget: Budget) -> None:
        """Record the last episode's final messages; their tokens are omitted if they exceed the budget.

        Raises:
            TemplateError: The chat template rejects the messages.
        """
        if self.last_messages:
            length, prompt_length = len(self.transcript.token_ids), self.transcript.prompt_length
            room = replace(budget, turn=None).room(length=length, prompt_length=prompt_length)
            self.transcript.close(self.last_messages, room)
            self.last_messages = []


def chat_format_of(
    tokenizer: Any, config: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
) -> ChatFormat | None:
    """Return the tokenizer's chat format for a configuration; None without a tokenizer.

    Raises:
        ConfigError: There are tools, and the chat template renders calls that cannot be parsed; or an unguarded token
            marks a role, a turn, a tool call or reasoning.
        TemplateError: Exact token ids cannot be recorded with this chat template.
    """
    if tokenizer is None:
        return None
    if config["history"] in (LAST, SUMMARIZE) and not tokenizer.chat_template:
        raise TemplateError(
            f"env_config['history'] = {config['history']!r} needs a chat template to render what it keeps, but the "
            "tokenizer has none: set tokenizer.chat_template, or use history 'append'"
        )
    chat_format = ChatFormat.of(
        tokenizer,
        append=config["history"] != "rerender",
        guard_added_tokens=config["guard_added_tokens"],
        unguarded_tokens=config["unguarded_tokens"],
        tools=tools,
        template_options=config["chat_template_kwargs"],
    )
    known = {*re.findall(r"\w+", str(tokenizer.chat_template))}
    for name in config["chat_template_kwargs"].keys() - known:
        logger.warning("the chat template does not use %r of chat_template_kwargs%s", name, did_you_mean(name, known))
    if tools:
        chat_format.check_calls()
    return chat_format


def check_tool_use(tokenizer: Any, config: Mapping[str, Any]) -> None:
    """Check that tool calls and tool results can be recorded.

    Raises:
        ConfigError: The chat template renders calls that cannot be parsed.
        TemplateError: Exact token ids cannot be recorded, or tool results cannot be appended as they are rendered.
    """
    chat_format = chat_format_of(tokenizer, config)
    if chat_format is None:
        return
    chat_format.check_calls()
    if config["history"] != "rerender":
        chat_format.check_results()
