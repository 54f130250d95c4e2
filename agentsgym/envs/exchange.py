"""What passes between one trial and its environment: observations, actions and rewards, and the record of them.

::

    for each turn:                  observe ─▶ room ─▶ request ─▶ (agent) ─▶ record ─▶ step ─▶ turn
    at the end of each episode:     reward_episode
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from functools import partial
from types import CoroutineType
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
    with_role_reward,
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
from agentsgym.types import Action, Message, Turn, TurnRequest, with_fields

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
        tools: The JSON schemas of the tools that the agent may call in the current turn.
        role: The role that moves in the current turn.
        parent: Index of the turn that the current one follows in a tree of calls; None without a tree.
    """

    may_wait: ClassVar[bool] = False
    role: Hashable = None
    parent: int | None = None
    _state_key: Hashable = None
    _potential: float | None = None

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
        self._note_turns, chat_format = note_turns, env.chat_format
        self._vocabulary_size = math.inf if chat_format is None else chat_format.vocabulary_size
        hooks = (env._state_key, env._role, env._potential)
        self._describes_states = any(_module_of(one) != "agentsgym.envs.base" for one in hooks)
        self._hook = "_step_action" if env.overrides_step_action else "_step_episode"
        self._states, self._tables = env.active_states, env.tables
        self._views: Views | None = None
        self._last_turns: LastTurns | None = None
        self.tools: Sequence[Mapping[str, Any]] = env.tool_schemas
        self.conversation = self.new_conversation()
        self._transcript = self.conversation.transcript

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

    def observe(self, state: State, step: int) -> Step | None:
        """Record the observation before a turn; return a step that ends the episode before it, or None."""
        if self._views is None:
            messages = as_messages(call_environment(self.env._format_prompt, state, step))
        else:
            messages = self._views.observe(self.env, state, is_first=step == 0)
        if step == 0:
            messages = self._begun(messages)
        for message in messages:
            if not (message["content"].isascii() or is_unicode(message["content"])):
                raise EnvError(f"the observation before turn {step} must be valid Unicode, got {shown(messages)}")
        self._observe(messages, step)
        return None

    def _begun(self, messages: list[Message]) -> list[Message]:
        """Return the first messages of an episode, together with those that precede them."""
        if not self._transcript.messages:
            messages = [*system_messages(self.env), *messages]
        elif self._last_turns is not None:
            self._last_turns.begin_episode(messages)
        return self.conversation.with_last_messages(messages)

    def room(self) -> int | None:
        """Return the number of tokens left for an action, None for no limit; without any, remove the observation."""
        transcript, budget = self._transcript, self.budget
        length = len(transcript.token_ids)
        room = budget.room(length=length, prompt_length=transcript.prompt_length)
        if room is None or room > 0:
            return room
        if self.conversation.turns:  # a row ends with an agent token; a first prompt that is too long is kept
            transcript.retract()
        elif budget.context is not None and budget.context <= length:
            text = "a first prompt of %d tokens leaves no room for an answer within the agent's context (%d tokens)"
            raise AgentError(text % (length, budget.context))
        else:
            text = "session %s: the first prompt uses up the token budget, %s, so no turn is played"
            logger.warning(text, self.session_id, budget)
        return room

    def prompt_messages(self) -> list[Message] | None:
        """Return the messages in a prompt that ``history`` may have changed; None if they are the recorded ones."""
        shown, recorded = self._transcript.prompt_messages, self._transcript.messages
        drops_later = self.conversation.notes is not None or self._last_turns is not None
        return None if drops_later and shown == recorded else [*shown]

    def request(self, state: State, episode: int, room: int | None) -> TurnRequest:
        """Begin a turn of a state, and make the request for its action, of at most ``room`` tokens."""
        conversation, transcript, tools = self.conversation, self._transcript, self.tools
        messages = transcript.prompt_messages
        self._episode, self._num_shown = episode, len(messages)
        self._prompt = None if messages is transcript.messages else self.prompt_messages()
        if self._describes_states:
            key = as_hashable("_state_key", call_environment(self.env._state_key, state))
            potential = call_environment(self.env._potential, state)
            self._state_key = None if key is None else (episode, key)
            self.role = as_hashable("_role", call_environment(self.env._role, state))
            self._potential = None if potential is None else as_number("_potential", potential)
        if tools:
            conversation.has_tools = True
        return with_fields(
            TurnRequest,
            session_id=self.session_id,
            messages=messages,
            token_ids=transcript.token_ids,
            agent_state=conversation.agent_state,
            max_new_tokens=room,
            tools=tools,
        )

    def _needs_note(self, notes: NotedHistory) -> bool:
        num_turns = len(self.conversation.turns)
        if self._note_turns is not None:
            return num_turns in self._note_turns and num_turns not in notes.note_turns
        return notes.is_due(self._transcript, num_turns)

    def note(self, state: State, step: int, episode: int) -> Generator[TurnRequest, Action, None]:
        """If a note is due, let the agent write it in place of the observation, which then follows the note."""
        conversation, notes = self.conversation, cast("NotedHistory", self.conversation.notes)
        if not self._needs_note(notes):
            return
        transcript, messages = self._transcript, self._new_messages
        transcript.retract()
        self._observe([Message(role="user", content=notes.prompt)], step)
        room = self.budget.room(length=len(transcript.token_ids), prompt_length=transcript.prompt_length)
        if room is not None and room <= 0:  # the turn itself has no room either
            transcript.retract()
            self._observe(messages, step)
            return
        self.record((yield self.request(state, episode, room)), room, reads_calls=False)
        turn = self.turn(Step())
        if turn.state_key is not None:
            turn = dataclasses.replace(turn, state_key=(episode, ("note", cast("Any", turn.state_key)[1])))
        notes.written(len(conversation.turns))
        conversation.turns.append(turn)
        # Results of tools become user messages, since the note precedes them instead of their calls.
        texts = [Message(role="user", content=one["content"]) if one["role"] == "tool" else one for one in messages]
        self._observe(texts, step)

    def _observe(self, messages: list[Message], step: int) -> None:
        self._new_messages, transcript = messages, self._transcript
        try:
            transcript.observe(messages)
        except TemplateError as error:
            if not transcript.messages:
                raise  # the template does not support this environment, which affects every episode
            raise EnvError(f"the observation before turn {step} cannot be recorded: {error}") from error

    def record(self, action: Action, room: int | None, *, reads_calls: bool = True) -> Action:
        """Record the action; return it as the environment gets it, parsed."""
        conversation, transcript = self.conversation, self._transcript
        try:
            if isinstance(action, Action) and not type(action.text) is type(action.written) is str:  # pyright: ignore[reportUnnecessaryIsInstance]
                action = with_plain_text(action)
            error = action_error(action, room, self._vocabulary_size, transcript.token_ids)
            if len(transcript.prompt_messages) != self._num_shown:
                error = "the agent changed request.messages, the recorded conversation: it may change a copy"
        except BaseException as raised:  # the agent's answer comes from user code, too
            if is_interruption(raised):
                raise
            raise failure_of(AgentError, "what the agent returned", raised) from raised
        if error:
            raise AgentError(f"session {self.session_id}: {error}")
        action = self.read(action) if reads_calls else read_answer(action, transcript.chat_format)
        try:
            self._span = transcript.act(action, room)
        except TemplateError as refused:
            raise AgentError(
                f"session {self.session_id}: the agent's answer cannot be recorded: {refused}"
            ) from refused
        if action.tool_calls:
            conversation.count(action.tool_calls)
        conversation.agent_state = action.agent_state
        conversation.logprobs.append(action.logprobs)
        self._action = action
        return self._as_recorded(action) if transcript.was_cut else action

    def _as_recorded(self, action: Action) -> Action:
        """Return the part of an answer that was recorded before the limit of its text."""
        cut = self._transcript.messages[-1]
        given = {"text": cut["content"], "reasoning": cut.get("reasoning_content"), "tool_calls": ()}
        return dataclasses.replace(action, **given)

    def turn(self, step: Step) -> Turn:
        """Return the turn of the recorded action, which led to this step."""
        transcript, action, (start, stop) = self._transcript, self._action, self._span
        reward, _, invalid, role_rewards, _, components, role_components = step
        turn = with_fields(
            Turn,
            start=start,
            stop=stop,
            reward=reward,
            invalid=invalid,
            exact=action.token_ids is not None,
            episode=self._episode,
            message_index=len(transcript.messages) - 1,
            prompt_start=transcript.segment_start,
            policy_version=action.policy_version,
        )
        is_plain = components is role_rewards is self._prompt is self.role is self.parent is None
        if is_plain and not self._describes_states:
            return turn
        return dataclasses.replace(
            turn,
            state_key=self._state_key,
            role=self.role,
            potential=self._potential,
            prompt_messages=self._prompt,
            role_rewards=role_rewards,
            components=components,
            role_components=role_components,
            parent=self.parent,
        )

    def read(self, action: Action) -> Action:
        """Split a valid action into reasoning, text and, if there are tools, calls."""
        if not self.tools and not self._reader.may_think(action):
            return action  # as read_answer does, in fewer steps: most answers are plain text
        chat_format, is_strict = self._transcript.chat_format, self.env.env_config["tool_calls"] == "strict"
        return read_answer(action, chat_format, self.tools or None, is_strict=is_strict)

    def step(self, state: State, action: Action) -> Step:
        """Pass the action to the environment, and keep its next state and ``info``."""
        name, session_id = self._hook, self.session_id
        hook: Callable[..., Any] = getattr(self.env, name)
        try:  # like call_environment, inlined for a shorter traceback
            answer = hook(session_id, state, action if name == "_step_action" else action.text)
            if type(answer) is CoroutineType:
                answer = awaited(answer)
        except BaseException as error:
            raise failure_of_hook(hook, error) from error
        state, step, info = as_step(answer, name)
        self._states[session_id] = state
        if info:
            check_info_keys(type(self.env), info)
        if self._views is not None:
            self._views.act(action.text)
        elif session_id in self._tables:
            _, step, info = self._tables[session_id].follow(state, step, info)
        self.conversation.info = info
        return step if step.role_rewards is None else with_role_reward(self.role, step, step.role_rewards)

    def reward_episode(self, turns: Sequence[Turn], rewards: list[float]) -> None:
        """Add the final reward of an episode, unless its rewards are given by role."""
        if any(one.role_rewards is not None for one in turns):
            return
        state = self.env.active_states[self.session_id]
        reward, components = as_reward("_final_reward", call_environment(self.env._final_reward, state, rewards))
        is_sum = components is None and not self.env.overrides_final_reward
        if is_sum and any(one.components is not None for one in turns):
            components = sum_components([(one.reward, one.components) for one in turns])
        self.conversation.final_reward += reward
        self.conversation.final_parts.append((reward, components))
