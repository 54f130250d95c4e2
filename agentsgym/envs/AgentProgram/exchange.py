"""Play a program: each of its calls is a turn, answered by the agent.

::

    program ─▶ endpoint ─▶ session.next_call ─▶ observe ─▶ TurnRequest ─▶ agent ─▶ act ─▶ Reply ─▶ endpoint ─▶ program

A call continues the recorded tokens of the call whose conversation it extends, or begins a new segment.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from bisect import bisect_left
from collections.abc import Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol, cast

from agentsgym.credit.components import GivenReward, add_rewards
from agentsgym.envs.AgentProgram.calls import CallError, Reply
from agentsgym.envs.AgentProgram.programs import ProgramOutcome
from agentsgym.envs.AgentProgram.session import ProgramCall
from agentsgym.envs.boundary import Step, as_grade, as_reward, call_environment
from agentsgym.envs.contract import PlayableEnv, State
from agentsgym.envs.conversation import Conversation
from agentsgym.envs.exchange import Exchange
from agentsgym.errors import ConfigError, EnvError, TemplateError
from agentsgym.event_loop import awaited
from agentsgym.failures import failure_of
from agentsgym.interruptions import is_interruption
from agentsgym.tokens.branches import BranchingTranscript
from agentsgym.tokens.tool_messages import strings_in
from agentsgym.tokens.transcript import ChatFormat
from agentsgym.types import Action, Message, ToolCall, Turn, TurnRequest

_SHORTEST: Final = 12  # characters of a line that identifies an answer if it occurs elsewhere
_SHORTEST_ID: Final = 8  # characters of the id of a tool call that identifies it in a text
_MAX_LINES: Final = 8  # of an answer, the longest


@dataclass(slots=True)
class CallTree:
    """The calls so far.

    A call follows, by the first rule that applies:

    1. the call whose conversation it continues,
    2. the call that the program named,
    3. the same call as an earlier one with the same prompt (a retry, or one of several answers),
    4. the latest call of whose answer its prompt contains a line, or the id of a tool call (a history that was
       summarized, a task or a result of another agent, a handoff),
    5. the latest call whose answer contains its last message (a part of a task for another agent),
    6. none: it is a root.

    Lines are those of an answer's text and of the arguments of its tool calls. A line that the call's own prompt
    contains does not identify the answer: a label such as "very positive" stands in the instructions of every call
    that has one.

    Attributes:
        parents: The index of each call's parent; None for a root.
        num_conversations: The number of calls that continue no other.
    """

    parents: list[int | None] = field(default_factory=list[int | None])
    num_conversations: int = 0
    _ids: dict[str, int] = field(default_factory=dict[str, int])
    _prompts: dict[int, int] = field(default_factory=dict[int, int])
    _lines: list[list[str]] = field(default_factory=list[list[str]])
    _answers: list[str] = field(default_factory=list[str])
    _tool_calls: list[frozenset[str]] = field(default_factory=list[frozenset[str]])

    def add(
        self, call_id: str, prompt: Sequence[Message], answer: Message, continued: int | None, named: str | None
    ) -> int | None:
        """Add an answered call, and return the index of its parent.

        Args:
            call_id: The id of the call.
            prompt: The complete prompt.
            answer: The answer, as it was returned.
            continued: The index of the call whose conversation it continues.
            named: The id of the call that the program named as the parent.
        """
        key = hash(tuple((one["role"], one["content"], str(one.get("tool_calls", ""))) for one in prompt))
        parent = continued
        if parent is None:
            self.num_conversations += 1
            parent = self._caused_by(key, prompt, named)
        self._ids[call_id] = self._prompts[key] = len(self.parents)
        self.parents.append(parent)
        self._answers.append(_text([answer]))
        self._tool_calls.append(_tool_calls([answer]))
        lines = {line.strip() for line in self._answers[-1].splitlines()}
        new = [line for line in lines if len(line) >= _SHORTEST and not any(line in one["content"] for one in prompt)]
        self._lines.append(sorted(new, key=len)[-_MAX_LINES:])
        return parent

    def index(self, call_id: str) -> int | None:
        """The index of a call; None for an unknown id."""
        return self._ids.get(call_id)

    def _caused_by(self, key: int, prompt: Sequence[Message], named: str | None) -> int | None:
        if named in self._ids:
            return self._ids[named]
        if key in self._prompts:
            return self.parents[self._prompts[key]]
        text, last = _text(prompt), prompt[-1]["content"].strip()
        latest = range(len(self.parents) - 1, -1, -1)
        tool_calls = _tool_calls(prompt)
        for index in latest:
            ids = self._tool_calls[index]
            if ids & tool_calls or any(one in text for one in (*self._lines[index], *filter(_is_unique, ids))):
                return index
        is_part = len(last) >= _SHORTEST
        return next((index for index in latest if is_part and last in self._answers[index]), None)


def _is_unique(call_id: str) -> bool:
    """Whether an id is too long to be in a text by chance."""
    return len(call_id) >= _SHORTEST_ID


def _tool_calls(messages: Sequence[Message]) -> frozenset[str]:
    """The ids of tool calls that messages make or answer."""
    made = [str(call.get("id")) for message in messages for call in message.get("tool_calls", ())]
    return frozenset(made) | {message["tool_call_id"] for message in messages if "tool_call_id" in message}


def _text(messages: Sequence[Message]) -> str:
    """The texts of messages, and the values in the arguments of their tool calls."""
    texts: list[str] = []
    for message in messages:
        texts.append(message["content"])
        for call in message.get("tool_calls", ()):
            texts += strings_in(_values(call["function"]["arguments"]))
    return "\n".join(texts)


def _values(arguments: Any) -> Any:
    """Arguments without the names of their fields."""
    if isinstance(arguments, Mapping):
        return [_values(one) for one in cast("Mapping[Any, Any]", arguments).values()]
    return [_values(one) for one in cast("list[Any]", arguments)] if isinstance(arguments, list) else arguments


# pyright: reportPrivateUsage=false
# The environment and its trial are one thing in two files.

_MAX_REJECTED = 32  # calls in a row that do not fit the budget or the template, before the episode ends


class ProgramEnv(PlayableEnv, Protocol):
    """What a trial uses of ``AgentProgramEnv``, which documents it."""

    tokenizer: Any

    def _format_with(self, tools: Sequence[Mapping[str, Any]], /) -> ChatFormat | None: ...

    def _next_call(self, state: State, /) -> Coroutine[Any, Any, ProgramCall | None]: ...

    def _deliver(self, state: State, call: ProgramCall, reply: Reply, /) -> Coroutine[Any, Any, bool]: ...

    def _graded(
        self, task_data: dict[str, Any], outcome: ProgramOutcome, /
    ) -> Coroutine[Any, Any, tuple[str, Any]]: ...


class CallExchange(Exchange):
    """The turns of a trial that are the calls of a program."""

    may_wait: ClassVar[bool] = True

    @property
    def _programs(self) -> ProgramEnv:
        return cast("ProgramEnv", self.env)

    @property
    def _transcript(self) -> BranchingTranscript:
        return cast("BranchingTranscript", self.conversation.transcript)

    def new_conversation(self) -> Conversation:
        """Make an empty record, in which conversations may branch."""
        conversation = Conversation(None, "append")
        conversation.transcript = BranchingTranscript(self._programs._format_with, self._programs.tokenizer)
        self._tree, self._call, self._is_cut = CallTree(), None, False
        self._delivered: int | None = None  # the last call whose answer the program received
        return conversation

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools of the call."""
        return () if self._call is None else self._call.request.tools

    def prompt_messages(self) -> list[Message] | None:
        """Return the messages of the call; None if they are the recorded ones."""
        transcript = self._transcript
        return None if transcript.prompt_messages == transcript.messages else [*transcript.prompt_messages]

    def observe(self, state: State, step: int, episode: int) -> Generator[TurnRequest, Action, int | Step | None]:
        """Wait for a call that fits, and record its prompt; a program that ends after a rejected call ends the episode.

        Raises:
            EnvError: The program ended without a call.
        """
        yield from ()
        for _ in range(_MAX_REJECTED):
            self._call = call = call_environment(self._programs._next_call, state)
            if call is None:
                if not self.conversation.turns:
                    raise EnvError(_without_call(self._outcome(state)))
                return 0 if self._is_cut else Step(done=True)
            room = self._observed(call)
            if room is None or room > 0:
                return room
        return 0

    def _observed(self, call: ProgramCall) -> int | None:
        """Record a call's prompt; 0 if the call was rejected instead."""
        transcript, request = self._transcript, call.request
        try:
            if request.prompt is None:
                transcript.observe(request.messages, request.tools)
            else:
                transcript.observe_text(request.prompt)
        except (TemplateError, ConfigError) as error:  # the tools, too, are the program's
            awaited(self._reject(call, CallError(f"the prompt cannot be recorded: {error}")))
            return 0
        length = len(transcript.token_ids)
        room = self.budget.room(length=length, prompt_length=transcript.prompt_length)
        if room is not None and room <= 0:
            transcript.retract()
            sentence = f"the prompt of {length} tokens leaves no token for an answer within the budget, {self.budget}"
            awaited(self._reject(call, CallError(sentence, code="context_length_exceeded")))
            self._is_cut = True
            return 0
        self._is_cut = False
        limits = [limit for limit in (room, request.max_new_tokens) if limit is not None]
        return min(limits, default=None)

    async def _reject(self, call: ProgramCall, error: CallError) -> None:
        self.env.active_states[self.session_id]["num_rejected"] += 1
        call.reject(error)

    def record(self, action: Action, turn: Turn, room: int | None, *, reads_calls: bool = True) -> tuple[Action, Turn]:
        """Record the action up to the first of the texts at which the call stops."""
        stops = () if self._call is None else self._call.request.stop
        self._stopped_by: str | None = None
        if stops and isinstance(action, Action):  # pyright: ignore[reportUnnecessaryIsInstance]  # checked by super
            action, self._stopped_by = _stopped(action, stops, self.conversation.transcript.chat_format)
        return super().record(action, turn, room, reads_calls=reads_calls)

    def step(self, state: State, action: Action) -> Step:
        """Return the answer to the program, and wait for its next call or its end."""
        call, transcript = cast("ProgramCall", self._call), self._transcript
        prompt, returned = transcript.prompt_messages[:-1], transcript.returned
        self.parent = self._tree.add(call.call_id, prompt, returned, transcript.parent, call.parent)
        reply = self._reply(call, action, returned)
        num_undelivered = state["num_undelivered"]
        is_over = call_environment(self._programs._deliver, state, call, reply)
        if state["num_undelivered"] == num_undelivered:
            self._delivered = len(self._tree.parents) - 1
        self.conversation.info = self._counts(state)
        return Step(done=is_over)

    def _reply(self, call: ProgramCall, action: Action, returned: Message) -> Reply:
        transcript = self._transcript
        token_ids, logprobs = [*(action.token_ids or ())], action.logprobs
        if logprobs is not None:
            logprobs = None if any(map(math.isnan, logprobs)) else [float(one) for one in logprobs]
        chat_format = transcript.chat_format
        texts: list[str] = []
        if call.request.logprobs and chat_format is not None:
            texts = [chat_format.decode([one]) for one in token_ids]
        return Reply(
            call_id=call.call_id,
            text=returned["content"],
            reasoning=action.reasoning,
            tool_calls=[ToolCall(id=one["id"], **one["function"]) for one in returned.get("tool_calls", ())],
            finish_reason=action.finish_reason,
            stopped_by=self._stopped_by,
            prompt_ids=transcript.token_ids[: len(transcript.token_ids) - len(token_ids)] if token_ids else (),
            token_ids=token_ids,
            token_texts=texts,
            logprobs=logprobs,
        )

    def _counts(self, state: State) -> dict[str, Any]:
        """The numbers of ``info``."""
        return {
            "num_calls": len(self._tree.parents),
            "num_conversations": self._tree.num_conversations,
            "num_rejected_calls": state["num_rejected"],
            "num_undelivered_calls": state["num_undelivered"],
        }

    async def _finish(self, state: State) -> ProgramOutcome:
        """End the program if it still runs, and wait for late rewards.

        Raises:
            Exception: What the program raised.
        """
        session, running = state["session"], state["running"]
        if not running.outcome.done():
            most = self.env.env_config["max_steps_per_episode"]
            is_full = most is not None and len(self.conversation.turns) >= most
            used = (
                f"its calls, env_config['max_steps_per_episode'] = {most}" if is_full else f"its budget, {self.budget}"
            )
            session.close(f"the episode is over: it has used {used}")
            if session.is_ended_by_owner:
                await asyncio.wait([running.outcome])
            await running.stop()
        if timeout_s := self.env.env_config["reward_timeout_s"]:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.has_all_rewards.wait(), timeout_s)
        return await running.outcome

    def _outcome(self, state: State) -> ProgramOutcome:
        """Wait for the outcome; a program may raise if the budget of turns or tokens has ended its episode."""
        try:
            return awaited(self._finish(state))
        except BaseException as error:
            if is_interruption(error):
                raise
            if self.conversation.turns and (self._is_cut or state["session"].is_closed):
                return ProgramOutcome(is_complete=False)
            raise failure_of(EnvError, "the program", error) from error

    def reward_episode(self, turns: Sequence[Turn], rewards: list[float]) -> None:
        """End the program, and add the rewards of its calls and of its outcome."""
        conversation, state = self.conversation, self.env.active_states[self.session_id]
        reward, info = as_grade(*call_environment(self._programs._graded, self.task_data, self._outcome(state)))
        conversation.info = {**self._counts(state), **info}
        last = len(turns) - 1 if self._delivered is None else self._delivered
        by_turn: dict[int, list[GivenReward]] = {last: [reward]}
        for call_id, reward in state["session"].rewards:
            place = self._tree.index(call_id)
            if place is not None:  # otherwise its answer is not recorded, since a budget ended the episode
                by_turn.setdefault(place, []).append(reward)
        for place, its_rewards in by_turn.items():
            reward, components = as_reward("the reward of a call", add_rewards(its_rewards))
            turn = conversation.turns[place]
            conversation.turns[place] = dataclasses.replace(turn, reward=reward, components=components)
        super().reward_episode(conversation.turns, [one.reward for one in conversation.turns])


def _without_call(outcome: ProgramOutcome) -> str:
    how = "" if outcome.exit_code is None else f" with exit code {outcome.exit_code}"
    last = f"; its standard error ended with:\n{outcome.errors}" if outcome.errors else ""
    return f"the program ended{how} without calling the policy, so it has no turns to train on{last}"


def _stopped(action: Action, stops: Sequence[str], chat_format: ChatFormat | None) -> tuple[Action, str | None]:
    """End an action at the first of these texts: drop the tokens after it, which were sampled for nothing."""
    found = min(((place, stop) for stop in stops if (place := action.text.find(stop)) >= 0), default=None)
    if found is None:
        return action, None
    place, stop = found
    token_ids, logprobs = action.token_ids, action.logprobs
    if token_ids is not None and chat_format is not None:
        ids = token_ids
        kept = 1 + bisect_left(range(1, len(ids)), True, key=lambda k: stop in chat_format.decode(ids[:k]))
        token_ids, logprobs = token_ids[:kept], None if logprobs is None else logprobs[:kept]
    text = action.text[:place]
    return dataclasses.replace(action, text=text, token_ids=token_ids, logprobs=logprobs, finish_reason="stop"), stop
