"""What passes between one trial and its environment: observations, actions and rewards, and the record of them.

::

    Trial._turn:     observe ─▶ request ─▶ (agent) ─▶ record ─▶ step     for each turn
    Trial._episode:  reward_episode                                      at the end of each episode
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

from agentsgym.credit.components import sum_components
from agentsgym.envs.boundary import (
    Step,
    action_error,
    as_hashable,
    as_messages,
    as_number,
    as_reward,
    as_step,
    call_environment,
    failure_of_hook,
    is_unicode,
    rewritten_history,
    system_messages,
    with_plain_text,
)
from agentsgym.envs.contract import PlayableEnv, State
from agentsgym.envs.conversation import LAST, SUMMARIZE, VIEWS, Budget, Conversation, LastTurns, NotedHistory, Views
from agentsgym.envs.user_checks import check_info_keys
from agentsgym.errors import AgentError, EnvError, TemplateError
from agentsgym.event_loop import awaited
from agentsgym.failures import failure_of
from agentsgym.interruptions import is_interruption
from agentsgym.texts import shown
from agentsgym.tokens.calls.reader import read_answer, reader_of
from agentsgym.tokens.transcript import History
from agentsgym.types import Action, Message, Turn, TurnRequest

# pyright: reportPrivateUsage=false
# The hooks are private for users of an environment; trials call them.

logger = logging.getLogger(__name__)


def _module_of(hook: Any) -> str | None:
    return getattr(hook, "__globals__", {}).get("__name__")  # which ``functools.wraps`` does not copy


class Exchange:
    """One trial's turns, played through the hooks of ``MultistepEnv`` and recorded as one conversation.

    An environment whose turns come from elsewhere, such as the calls of a program, names a subclass as its
    ``exchange_class``, which overrides some of the methods without an underscore.

    Attributes:
        may_wait: Whether a step may wait for other trials, as programs do that share something: a batched agent then
            answers the others once no request has arrived for a moment. Such trials cannot be forked.
        conversation: The record.
        parent: Index of the turn that the current one follows in a tree of calls; None without a tree.
    """

    may_wait: ClassVar[bool] = False
    parent: int | None = None

    def __init__(
        self,
        env: PlayableEnv,
        session_id: str,
        *,
        task_data: Mapping[str, Any],
        budget: Budget,
        note_turns: Sequence[int] | None = None,
    ) -> None:
        """Begin a record; the arguments are attributes of :class:`~agentsgym.envs.trial.Trial`."""
        self.env, self.session_id, self.task_data, self.budget = env, session_id, task_data, budget
        self._note_turns = note_turns
        hooks = (env._state_key, env._role, env._potential)
        self._describes_states = any(_module_of(one) != "agentsgym.envs.base" for one in hooks)
        self._views: Views | None = None
        self._last_turns: LastTurns | None = None
        self.conversation = self.new_conversation()

    def new_conversation(self) -> Conversation:
        """Make an empty record."""
        history: History = self.env.env_config["history"]
        if history == VIEWS:
            history = self._views = Views()
        elif history == LAST:
            history = self._last_turns = LastTurns(self.env.env_config["history_turns"])
        elif history == SUMMARIZE:
            history = NotedHistory(self.env.env_config["summarize_over_tokens"], self.env.env_config["summary_prompt"])
        elif callable(history):
            history = partial(rewritten_history, history)
        self._reader = reader_of(self.env.chat_format)
        return Conversation(self.env.chat_format, history)

    def observe(self, state: State, step: int, episode: int) -> Generator[TurnRequest, Action, int | Step | None]:
        """Record the next observation, after a turn in which the agent writes a note if one is due.

        Returns:
            The number of tokens left for an action, None for no limit; or a step that ends the episode before the turn.
        """
        conversation, transcript = self.conversation, self.conversation.transcript
        messages = self._observation(state, step)
        self._observe(messages, step)
        if conversation.notes is not None and self._needs_note(conversation.notes):
            yield from self._note(state, step, episode, messages)
        room = self.budget.room(length=len(transcript.token_ids), prompt_length=conversation.prompt_length)
        if room is not None and room <= 0:
            if conversation.turns:  # a row ends with an agent token; a first prompt that is too long is kept to be seen
                transcript.retract()
            elif self.budget.context is not None and self.budget.context <= len(transcript.token_ids):
                text = "a first prompt of %d tokens leaves no room for an answer within the agent's context (%d tokens)"
                raise AgentError(text % (len(transcript.token_ids), self.budget.context))
            else:
                text = "session %s: the first prompt uses up the token budget, %s, so no turn is played"
                logger.warning(text, self.session_id, self.budget)
        return room

    def turn(self, state: State, episode: int) -> dict[str, Any]:
        """Return the fields of the turn that begins with the observation of a state: its prompt, without an action."""
        fields: dict[str, Any] = {"episode": episode, "role": None, "prompt_messages": self.prompt_messages()}
        if not self._describes_states:
            return fields
        key = as_hashable("_state_key", call_environment(self.env._state_key, state))
        potential = call_environment(self.env._potential, state)
        return {
            **fields,
            "state_key": None if key is None else (episode, key),
            "role": as_hashable("_role", call_environment(self.env._role, state)),
            "potential": None if potential is None else as_number("_potential", potential),
        }

    def prompt_messages(self) -> list[Message] | None:
        """Return the messages in the prompt; None if they are the recorded ones."""
        shown, recorded = self.conversation.transcript.prompt_messages, self.conversation.transcript.messages
        drops_later = self.conversation.notes is not None or self._last_turns is not None
        return None if shown is recorded or (drops_later and shown == recorded) else [*shown]

    def request(self, room: int | None) -> TurnRequest:
        """Make the request for the next action, of at most ``room`` tokens."""
        conversation = self.conversation
        messages = conversation.transcript.prompt_messages
        self._num_shown = len(messages)
        tools = self.tools
        conversation.has_tools = conversation.has_tools or bool(tools)
        return TurnRequest(
            session_id=self.session_id,
            messages=messages,
            token_ids=conversation.transcript.token_ids,
            agent_state=conversation.agent_state,
            max_new_tokens=room,
            tools=tools,
        )

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The JSON schemas of the tools that the agent may call in this turn."""
        return self.env.tool_schemas

    def _needs_note(self, notes: NotedHistory) -> bool:
        num_turns = len(self.conversation.turns)
        if self._note_turns is not None:
            return num_turns in self._note_turns and num_turns not in notes.note_turns
        return notes.is_due(self.conversation.transcript, num_turns)

    def _note(
        self, state: State, step: int, episode: int, messages: list[Message]
    ) -> Generator[TurnRequest, Action, None]:
        """Let the agent write a note in place of an observation, and then observe with the note as the history."""
        conversation, notes = self.conversation, cast("NotedHistory", self.conversation.notes)
        transcript = conversation.transcript
        transcript.retract()
        self._observe([Message(role="user", content=notes.prompt)], step)
        room = self.budget.room(length=len(transcript.token_ids), prompt_length=conversation.prompt_length)
        if room is not None and room <= 0:  # the turn itself has no room either
            transcript.retract()
            self._observe(messages, step)
            return
        turn = self.turn(state, episode)
        if turn.get("state_key") is not None:
            turn["state_key"] = (episode, ("note", turn["state_key"][1]))
        self.record((yield self.request(room)), turn, room, reads_calls=False)
        notes.written(len(conversation.turns))
        conversation.turns.append(Turn(reward=0.0, **turn))
        # Results of tools become user messages, since the note precedes them instead of their calls.
        texts = [Message(role="user", content=one["content"]) if one["role"] == "tool" else one for one in messages]
        self._observe(texts, step)

    def _observation(self, state: State, step: int) -> list[Message]:
        """Return the environment's new messages, with the system message before the first and the last before them."""
        conversation = self.conversation
        is_first = not conversation.transcript.messages
        if self._views is None:
            messages = as_messages(call_environment(self.env._format_prompt, state, step))
        else:
            messages = self._views.observe(self.env, state, is_first=step == 0)
        if is_first:
            messages = [*system_messages(self.env), *messages]
        elif self._last_turns is not None and step == 0:
            self._last_turns.begin_episode(messages)
        messages = conversation.with_last_messages(messages)
        for message in messages:
            if not is_unicode(message["content"]):
                raise EnvError(f"the observation before turn {step} must be valid Unicode, got {shown(messages)}")
        return messages

    def _observe(self, messages: list[Message], step: int) -> None:
        conversation = self.conversation
        is_first = not conversation.transcript.messages
        try:
            conversation.transcript.observe(messages)
        except TemplateError as error:
            if is_first:
                raise  # the template does not support this environment, which affects every episode
            raise EnvError(f"the observation before turn {step} cannot be recorded: {error}") from error
        if is_first:
            conversation.prompt_length = len(conversation.transcript.token_ids)

    def record(self, action: Action, turn: dict[str, Any], room: int | None, *, reads_calls: bool = True) -> Action:
        """Record the action, and add it to the fields of its turn; return it as the environment gets it, parsed."""
        conversation = self.conversation
        chat_format = conversation.transcript.chat_format
        vocabulary_size = math.inf if chat_format is None else chat_format.vocabulary_size
        try:
            if isinstance(action, Action) and not type(action.text) is type(action.written) is str:  # pyright: ignore[reportUnnecessaryIsInstance]
                action = with_plain_text(action)
            error = action_error(action, room, vocabulary_size, prompt=conversation.transcript.token_ids)
            if len(conversation.transcript.prompt_messages) != self._num_shown:
                error = "the agent changed request.messages, the recorded conversation: it may change a copy"
        except BaseException as raised:  # the agent's answer comes from user code, too
            if is_interruption(raised):
                raise
            raise failure_of(AgentError, "what the agent returned", raised) from raised
        if error:
            raise AgentError(f"session {self.session_id}: {error}")
        action = self.read(action) if reads_calls else read_answer(action, chat_format)
        try:
            start, stop = conversation.transcript.act(action, room)
        except TemplateError as refused:
            raise AgentError(
                f"session {self.session_id}: the agent's answer cannot be recorded: {refused}"
            ) from refused
        if action.tool_calls:
            conversation.count(action.tool_calls)
        conversation.agent_state = action.agent_state
        conversation.logprobs.append(action.logprobs)
        transcript = conversation.transcript
        turn |= {
            "start": start,
            "stop": stop,
            "exact": action.token_ids is not None,
            "message_index": len(transcript.messages) - 1,
            "prompt_start": transcript.segment_start,
            "policy_version": action.policy_version,
        }
        return self._as_recorded(action) if transcript.was_cut else action

    def _as_recorded(self, action: Action) -> Action:
        """Return the part of an answer that was recorded before the limit of its text."""
        cut = self.conversation.transcript.messages[-1]
        given = {"text": cut["content"], "reasoning": cut.get("reasoning_content"), "tool_calls": ()}
        return dataclasses.replace(action, **given)

    def read(self, action: Action) -> Action:
        """Split a valid action into reasoning, text and, if there are tools, calls."""
        if not self.tools and not self._reader.may_think(action):
            return action  # as read_answer does, in fewer steps: most answers are plain text
        chat_format, is_strict = self.conversation.transcript.chat_format, self.env.env_config["tool_calls"] == "strict"
        return read_answer(action, chat_format, self.tools or None, is_strict=is_strict)

    def step(self, state: State, action: Action) -> Step:
        """Pass the action to the environment, and keep its next state and ``info``."""
        env = self.env
        hook: Callable[..., Any] = env._step_action if env.overrides_step_action else env._step_episode
        try:  # like call_environment, inlined for a shorter traceback
            answer = awaited(hook(self.session_id, state, action if env.overrides_step_action else action.text))
        except BaseException as error:
            raise failure_of_hook(hook, error) from error
        state, step, info = as_step(answer, "_step_action" if env.overrides_step_action else "_step_episode")
        env.active_states[self.session_id] = state
        check_info_keys(type(env), info)
        if self._views is not None:
            self._views.act(action.text)
        elif self.session_id in env.tables:
            _, step, info = env.tables[self.session_id].follow(state, step, info)
        self.conversation.info = info
        return step

    def reward_episode(self, turns: Sequence[Turn], rewards: list[float]) -> None:
        """Add the final reward of an episode, unless its rewards are given by role."""
        if any(one.role_rewards is not None for one in turns):
            return
        state = self.env.active_states[self.session_id]
        reward, components = as_reward("_final_reward", call_environment(self.env._final_reward, state, rewards))
        if components is None and not self.env.overrides_final_reward:
            components = sum_components([(one.reward, one.components) for one in turns])
        self.conversation.final_reward += reward
        self.conversation.final_parts.append((reward, components))
