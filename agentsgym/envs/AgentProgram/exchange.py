"""Play a program: each of its calls is a turn, answered by the agent.

::

    program ─▶ endpoint ─▶ session.next_call ─▶ observe ─▶ TurnRequest ─▶ agent ─▶ act ─▶ Reply ─▶ endpoint ─▶ program

A call continues the recorded tokens of the call whose conversation it extends, or begins a new segment.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, cast

from agentsgym.credit.components import GivenReward, add_rewards
from agentsgym.envs.AgentProgram.calls import CallError, Reply
from agentsgym.envs.AgentProgram.programs import ProgramOutcome
from agentsgym.envs.AgentProgram.session import ProgramCall
from agentsgym.envs.boundary import Step, as_grade, as_reward, call_environment
from agentsgym.envs.contract import State
from agentsgym.envs.conversation import Conversation
from agentsgym.envs.exchange import Exchange
from agentsgym.errors import ConfigError, EnvError, TemplateError
from agentsgym.event_loop import awaited
from agentsgym.failures import failure_of
from agentsgym.interruptions import is_interruption
from agentsgym.tokens.branches import BranchingTranscript
from agentsgym.tokens.calls.reader import read_answer
from agentsgym.tokens.transcript import ChatFormat
from agentsgym.types import Action, Message, ToolCall, Turn

_SHORTEST: Final = 12  # characters of a line that identifies an answer if it occurs elsewhere
_SHORTEST_ID: Final = 8  # characters of the id of a tool call that identifies it in a text
_MAX_LINES: Final = 8  # of an answer, the longest


@dataclass(slots=True)
class CallTree:
    """The calls so far, and which call each follows, by the rules in ``docs/programs.md`` (the tree of calls).

    Attributes:
        parents: The index of each call's parent; None for a root.
        num_conversations: The number of calls that continue no other.
        indices: The index of each call, by its id.
    """

    parents: list[int | None] = field(default_factory=list[int | None])
    num_conversations: int = 0
    indices: dict[str, int] = field(default_factory=dict[str, int])
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
        self.indices[call_id] = self._prompts[key] = len(self.parents)
        self.parents.append(parent)
        self._answers.append(_text([answer]))
        self._tool_calls.append(_tool_calls([answer]))
        # A line that is in the prompt does not identify the answer: a label such as "very positive" may be in many.
        lines = {line.strip() for line in self._answers[-1].splitlines()}
        new = [line for line in lines if len(line) >= _SHORTEST and not any(line in one["content"] for one in prompt)]
        self._lines.append(sorted(new, key=len)[-_MAX_LINES:])
        return parent

    def _caused_by(self, key: int, prompt: Sequence[Message], named: str | None) -> int | None:
        if named in self.indices:
            return self.indices[named]
        if key in self._prompts:
            return self.parents[self._prompts[key]]
        text, last = _text(prompt), prompt[-1]["content"].strip()
        latest = range(len(self.parents) - 1, -1, -1)
        tool_calls = _tool_calls(prompt)
        for index in latest:
            ids = self._tool_calls[index]
            unique = [one for one in ids if len(one) >= _SHORTEST_ID]
            if ids & tool_calls or any(one in text for one in (*self._lines[index], *unique)):
                return index
        is_part = len(last) >= _SHORTEST
        return next((index for index in latest if is_part and last in self._answers[index]), None)


def _tool_calls(messages: Sequence[Message]) -> frozenset[str]:
    """The ids of tool calls that messages make or answer."""
    made = [str(call.get("id")) for message in messages for call in message.get("tool_calls", ())]
    return frozenset(made) | {message["tool_call_id"] for message in messages if "tool_call_id" in message}


def _text(messages: Sequence[Message]) -> str:
    """The texts of messages, and the values in the arguments of their tool calls."""
    texts: list[str] = []
    for message in messages:
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        texts += [message["content"], *_strings(calls)]
    return "\n".join(texts)


def _strings(value: Any) -> list[str]:
    """List every string in a JSON value, without the names of fields."""
    if isinstance(value, Mapping):
        value = [*cast("Mapping[Any, Any]", value).values()]
    if isinstance(value, list):
        return [text for one in cast("list[Any]", value) for text in _strings(one)]
    return [value] if isinstance(value, str) else []


_MAX_REJECTED = 32  # calls in a row that do not fit the budget or the template, before the episode ends


class CallExchange(Exchange):
    """The turns of a trial of ``AgentProgramEnv`` that are the calls of a program."""

    may_wait: ClassVar[bool] = True
    _call: ProgramCall
    _transcript: BranchingTranscript

    def new_conversation(self) -> Conversation:
        """Make an empty record, in which conversations may branch."""
        conversation, env = Conversation(None, "append"), cast("Any", self.env)
        conversation.transcript = BranchingTranscript(env._format_with, env.tokenizer)
        self._tree, self._is_cut = CallTree(), False
        self._delivered: int | None = None  # the last call whose answer the program received
        return conversation

    def prompt_messages(self) -> list[Message] | None:
        """Return the messages of the call; None if they are the recorded ones."""
        transcript = self._transcript
        return None if transcript.prompt_messages == transcript.messages else [*transcript.prompt_messages]

    def observe(self, state: State, step: int) -> Step | None:
        """Wait for a call that fits, and record its prompt; a program that ends after a rejected call ends the episode.

        Raises:
            EnvError: The program ended without a call.
        """
        for _ in range(_MAX_REJECTED):
            call = call_environment(_next_call, state)
            if call is None:
                if not self.conversation.turns:
                    raise EnvError(_without_call(self._outcome(state)))
                return None if self._is_cut else Step(done=True)
            self._call, self.tools = call, call.request.tools
            self._room = self._observed(call)
            if self._room is None or self._room > 0:
                break
        return None

    def room(self) -> int | None:
        """Return the number of tokens left for an action; 0 if the last calls were rejected."""
        return self._room

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

    def read(self, action: Action) -> Action:
        """Return the action up to the first of the texts at which the call stops, with its tool calls."""
        request, chat_format = self._call.request, self._transcript.chat_format
        action, self._stopped_by = _stopped(action, request.stop, chat_format)
        is_strict = self.env.env_config["tool_calls"] == "strict"
        return read_answer(action, chat_format, request.tools or None, self._stopped_by, is_strict=is_strict)

    def step(self, state: State, action: Action) -> Step:
        """Return the answer to the program, and wait for its next call or its end."""
        call, transcript = self._call, self._transcript
        prompt, returned = transcript.prompt_messages[:-1], transcript.returned
        self.parent = self._tree.add(call.call_id, prompt, returned, transcript.parent, call.parent)
        reply = self._reply(call, action, returned)
        is_delivered, state["next"] = call_environment(_deliver, state, call, reply)
        if is_delivered:
            self._delivered = len(self._tree.parents) - 1
        state["num_undelivered"] += not is_delivered
        self.conversation.info = self._counts(state)
        return Step(done=state["next"] is None)

    def _reply(self, call: ProgramCall, action: Action, returned: Message) -> Reply:
        transcript = self._transcript
        token_ids, chat_format = [*(action.token_ids or ())], transcript.chat_format
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
            logprobs=None if action.logprobs is None else [*map(float, action.logprobs)],
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
            if self.conversation.turns and (self._is_cut or state["session"].closed):
                return ProgramOutcome(is_complete=False)
            raise failure_of(EnvError, "the program", error) from error

    def reward_episode(self, turns: Sequence[Turn], rewards: list[float]) -> None:
        """End the program, and add the rewards of its calls and of its outcome."""
        conversation, state = self.conversation, self.env.active_states[self.session_id]
        reward, info = as_grade(*call_environment(cast("Any", self.env)._graded, self.task_data, self._outcome(state)))
        conversation.info, state["session"].is_graded = {**self._counts(state), **info}, True
        last = len(turns) - 1 if self._delivered is None else self._delivered
        by_turn: dict[int, list[GivenReward]] = {last: [reward]}
        for call_id, reward in state["session"].rewards:
            place = self._tree.indices.get(call_id)
            if place is not None:  # otherwise its answer is not recorded, since a budget ended the episode
                by_turn.setdefault(place, []).append(reward)
        for place, its_rewards in by_turn.items():
            reward, components = as_reward("the reward of a call", add_rewards(its_rewards))
            turn = conversation.turns[place]
            conversation.turns[place] = dataclasses.replace(turn, reward=reward, components=components)
        super().reward_episode(conversation.turns, [one.reward for one in conversation.turns])


async def _next_call(state: State) -> ProgramCall | None:
    """Return the next call of the program; None once it has ended."""
    return state.pop("next") if "next" in state else await state["session"].next_call()


async def _deliver(state: State, call: ProgramCall, reply: Reply) -> tuple[bool, ProgramCall | None]:
    """Send an answer to the program, and wait for its next call; return whether it still waited, and the call."""
    return call.answer(reply), await state["session"].next_call()


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
        # The first ``kept`` tokens contain the text, the first ``low`` do not: half as many are decoded each time.
        low, kept, margin = 0, len(token_ids), len(stop.encode()) + 4  # tokens in which the text may begin
        while kept - low > 1:
            middle = (low + kept) // 2
            if stop in chat_format.decode(token_ids[max(0, low - margin) : middle]):
                kept = middle
            else:
                low = middle
        token_ids, logprobs = token_ids[:kept], None if logprobs is None else logprobs[:kept]
    text = action.text[:place]
    return dataclasses.replace(action, text=text, token_ids=token_ids, logprobs=logprobs, finish_reason="stop"), stop
