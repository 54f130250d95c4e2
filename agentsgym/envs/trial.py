"""One trial in play: the generator that the driver advances, and the conversation that it records."""

from __future__ import annotations

import dataclasses
import logging
import math
import traceback
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from agentsgym.envs.answers import as_flag, as_number, check_told, complaint_about, is_conversation, is_step, is_unicode
from agentsgym.envs.config import is_int, or_none
from agentsgym.errors import AgentFault, ConfigError, EnvironmentFault, EpisodeFault, TemplateError
from agentsgym.rollouts.transcript import ChatFormat, History, Transcript
from agentsgym.types import Action, Message, StopReason, Trajectory, Turn, TurnRequest

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How many tokens a rollout may take; None is no limit.

    Attributes:
        trajectory: The whole of it, prompts included.
        completion: Everything after the first prompt, observations included.
        turn: One action.
    """

    trajectory: int | None = None
    completion: int | None = None
    turn: int | None = None

    def __post_init__(self) -> None:
        for name in ("trajectory", "completion", "turn"):
            limit = getattr(self, name)
            if not or_none(is_int(1))(limit):
                raise ConfigError(f"the token budget of a {name} must be a positive int or None, got {limit!r}")

    def room(self, *, length: int, prompt_length: int) -> int | None:
        """How many tokens the next action may have, after ``length`` tokens of which the first prompt took some.

        Where history is rewritten, ``length`` is that of the prompt as it then is.

        >>> Budget(trajectory=100, turn=30).room(length=80, prompt_length=10)
        20
        >>> Budget().room(length=80, prompt_length=10) is None
        True
        """
        whole = None if self.trajectory is None else self.trajectory - length
        completion = None if self.completion is None else self.completion - max(0, length - prompt_length)
        return min((limit for limit in (self.turn, whole, completion) if limit is not None), default=None)


class Conversation:
    """What one conversation leaves behind: its tokens, its turns and what they were paid."""

    def __init__(self, chat_format: ChatFormat | None, history: History) -> None:
        self.transcript = Transcript(chat_format, history)
        self.turns: list[Turn] = []
        self.logprobs: list[Sequence[float] | None] = []
        self.agent_state: Any = None
        self.prompt_length = 0
        self.final_reward = 0.0
        self.info: dict[str, Any] = {}

    def token_ids(self) -> list[int]:
        """The record, (T,), without a rewritten prompt that got no answer: no turn says that it begins anew."""
        token_ids = self.transcript.record()
        if self.turns and self.transcript.segment_start > self.turns[-1].prompt_start:
            return token_ids[: self.turns[-1].stop]
        return token_ids

    def token_logprobs(self, num_tokens: int) -> list[float] | None:
        """One log-probability for each of the first tokens, 0.0 on environment tokens; None if an action came without.

        Args:
            num_tokens: How many tokens.
        """
        values = [0.0] * num_tokens
        # The last action is on record before its turn is.
        for turn, logprobs in zip(self.turns, self.logprobs, strict=False):
            if turn.start == turn.stop:
                continue  # nothing said, or no tokenizer to keep what was said
            if logprobs is None:
                return None
            values[turn.start : turn.stop] = logprobs
        return values[:num_tokens]


class Step(NamedTuple):
    """What the game answered to an action."""

    reward: float = 0.0
    done: bool = False
    invalid: bool = False


@dataclass(slots=True, kw_only=True)
class Trial:
    """One session playing the episodes of one task in a row.

    Attributes:
        env: The environment whose hooks are called.
        session_id: Key of the session's state in ``env.active_states``.
        task_data: The task.
        seed: The task group's seed, from which every episode's generator is derived.
        budget: The token limits.
        task_index: Index of the task in the list given to ``rollout``.
        rollout_index: Index among the rollouts of that task.
    """

    env: MultistepEnv
    session_id: str
    task_data: dict[str, Any] = field(default_factory=dict[str, Any])
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    task_index: int = 0
    rollout_index: int = 0
    conversation: Conversation = field(init=False)

    def __post_init__(self) -> None:
        self.conversation = self._new_conversation()

    def play(self) -> Generator[TurnRequest, Action, Trajectory]:
        """Play every episode; a fault ends the trial with stop reason ``failed`` and keeps what was played."""
        config = self.env.env_config
        stop_reason = StopReason.DONE
        try:
            for episode in range(config["episodes_per_trial"]):
                if not config["keep_history"]:
                    self.conversation = self._new_conversation()
                self.env.start_session(self.session_id, self.task_data, self.seed, episode)
                stop_reason = yield from self._episode(episode, is_practice=episode < config["free_shots"])
                if config["keep_history"] and stop_reason is StopReason.MAX_TOKENS:
                    break  # the next episode would go on in the conversation that is full
            return self._trajectory(stop_reason)
        except EpisodeFault as fault:
            return self._failed(fault)
        finally:
            self.env.drop_session(self.session_id)

    def play_one(self) -> Generator[TurnRequest, Action, Trajectory]:
        """Play one episode of a session whose state is in ``env.active_states``; faults are raised."""
        stop_reason = yield from self._episode(0, is_practice=False)
        return self._trajectory(stop_reason)

    def abandon(self, fault: EpisodeFault) -> Trajectory:
        """What a trial came to whose generator cannot go on: failed, with the turns recorded so far.

        A step of it may still be running in another thread; what that records from now on is not in the trajectory.
        """
        conversation = self.conversation
        turns = [*conversation.turns]  # before the tokens: both only grow, so that no span leaves them
        token_ids = [*conversation.token_ids()]
        logprobs = conversation.token_logprobs(len(token_ids))
        logger.warning("session %s was given up at turn %d: %s", self.session_id, len(turns), fault)
        return Trajectory(
            token_ids=token_ids,
            turns=turns,
            messages=[*conversation.transcript.messages],
            final_reward=0.0,
            stop_reason=StopReason.FAILED,
            logprobs=logprobs,
            per_token_rewards=[0.0] * len(token_ids),
            session_id=self.session_id,
            task_index=self.task_index,
            rollout_index=self.rollout_index,
            info=conversation.info,
            error="".join(traceback.format_exception(fault)),
        )

    def __reduce__(self) -> tuple[partial[Trial], tuple[()]]:
        """A trial that has not begun, as another process plays it."""
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.init}
        return partial(Trial, **given), ()

    def _new_conversation(self) -> Conversation:
        history: History = self.env.env_config["history"]
        return Conversation(self.env.chat_format, partial(_rewritten, history) if callable(history) else history)

    def _episode(self, episode: int, *, is_practice: bool) -> Generator[TurnRequest, Action, StopReason]:
        config, conversation = self.env.env_config, self.conversation
        conversation.info = {}  # that practice was won says nothing about this episode
        stop_reason, num_invalid = StopReason.MAX_TURNS, 0
        rewards: list[float] = []
        for step in range(config["max_steps_per_episode"]):
            outcome = yield from self._turn(step, episode, is_practice=is_practice)
            if outcome is None:
                stop_reason = StopReason.MAX_TOKENS
                break
            rewards.append(outcome.reward)
            num_invalid += outcome.invalid
            if outcome.done or num_invalid > config["error_allowance"]:
                stop_reason = StopReason.DONE if outcome.done else StopReason.INVALID
                break
        if not is_practice:
            state = self.env.active_states[self.session_id]
            conversation.final_reward += as_number("_final_reward", call_game(self.env._final_reward, state, rewards))  # pyright: ignore[reportPrivateUsage]
        return stop_reason

    def _turn(self, step: int, episode: int, *, is_practice: bool) -> Generator[TurnRequest, Action, Step | None]:
        """Observe, ask, record, step; None where the budget leaves no room for an action."""
        conversation, state = self.conversation, self.env.active_states[self.session_id]
        transcript = conversation.transcript
        self._observe(state, step)
        room = self._room()
        if room is not None and room <= 0:
            self._leave()
            return None
        key, role = self._hashable("_state_key", state), self._hashable("_role", state)
        potential = self._potential(state)
        prompt_messages = None if transcript.prompt_messages is transcript.messages else [*transcript.prompt_messages]
        action = yield TurnRequest(
            session_id=self.session_id,
            messages=transcript.prompt_messages,
            token_ids=transcript.token_ids,
            agent_state=conversation.agent_state,
            max_new_tokens=room,
        )
        start, stop = self._record(action, room)
        outcome = Step()
        try:
            outcome = self._step(state, transcript.messages[-1]["content"])
        finally:  # a game that breaks does not lose the action
            turn = Turn(
                start=start,
                stop=stop,
                reward=0.0 if is_practice else outcome.reward,
                invalid=outcome.invalid,
                exact=action.token_ids is not None,
                episode=episode,
                message_index=len(transcript.messages) - 1,
                state_key=None if key is None else (episode, key),
                role=role,
                potential=potential,
                prompt_start=transcript.segment_start,
                prompt_messages=prompt_messages,
            )
            conversation.turns.append(turn)
        return outcome

    def _observe(self, state: dict[str, Any], step: int) -> None:
        conversation = self.conversation
        is_first = not conversation.transcript.messages
        messages = self.env.prompt_messages(state, step, with_system=is_first)
        if not all(is_unicode(message["content"]) for message in messages):
            raise EnvironmentFault(f"the observation before turn {step} must be valid Unicode, got {messages!r}")
        try:
            conversation.transcript.observe(messages)
        except TemplateError as error:
            if is_first:
                raise  # game and template do not go together at all: no episode's fault
            raise EnvironmentFault(f"the observation before turn {step} cannot be recorded: {error}") from error
        if is_first:
            conversation.prompt_length = len(conversation.transcript.token_ids)

    def _room(self) -> int | None:
        conversation = self.conversation
        return self.budget.room(length=len(conversation.transcript.token_ids), prompt_length=conversation.prompt_length)

    def _hashable(self, hook: str, state: dict[str, Any]) -> Hashable:
        answer = call_game(getattr(self.env, hook), state)
        try:
            hash(answer)
        except TypeError as error:
            raise EnvironmentFault(f"{hook} must return something hashable, got {answer!r}") from error
        return answer

    def _potential(self, state: dict[str, Any]) -> float | None:
        potential = call_game(self.env._potential, state)  # pyright: ignore[reportPrivateUsage]
        return None if potential is None else as_number("_potential", potential)

    def _leave(self) -> None:
        """Make the record end where the last turn did."""
        if self.conversation.turns:  # a row ends on an agent token; a first prompt that is too long stays to be seen
            self.conversation.transcript.retract()
        else:
            logger.warning("session %s: the first prompt leaves no room for a turn in %s", self.session_id, self.budget)

    def _record(self, action: Action, room: int | None) -> tuple[int, int]:
        """Put the action on record, before the game sees it; returns its span."""
        conversation = self.conversation
        chat_format = self.env.chat_format
        if complaint := complaint_about(action, room, math.inf if chat_format is None else chat_format.vocabulary_size):
            raise AgentFault(f"session {self.session_id}: {complaint}")
        span = conversation.transcript.act(action, room)
        conversation.agent_state = action.agent_state
        conversation.logprobs.append(action.logprobs)
        return span

    def _step(self, state: dict[str, Any], text: str) -> Step:
        answer = call_game(self.env._step_episode, self.session_id, state, text)  # pyright: ignore[reportPrivateUsage]
        if not is_step(answer):
            raise EnvironmentFault(f"_step_episode must return (state, reward, done, info), got {answer!r}")
        next_state, reward, done, info = answer
        step = Step(
            as_number("_step_episode's reward", reward),
            as_flag("_step_episode's done", done),
            as_flag("_step_episode's info['invalid']", info.get("invalid")),
        )
        check_told(info)
        next_state["done"] = step.done
        self.env.active_states[self.session_id] = next_state
        self.conversation.info = info
        return step

    def _trajectory(self, stop_reason: StopReason, error: str | None = None) -> Trajectory:
        conversation = self.conversation
        token_ids = conversation.token_ids()
        trajectory = Trajectory(
            token_ids=token_ids,
            turns=conversation.turns,
            messages=conversation.transcript.messages,
            final_reward=0.0 if error else conversation.final_reward,
            stop_reason=stop_reason,
            logprobs=conversation.token_logprobs(len(token_ids)),
            per_token_rewards=[0.0] * len(token_ids),
            session_id=self.session_id,
            task_index=self.task_index,
            rollout_index=self.rollout_index,
            info=conversation.info,
            error=error,
        )
        if error:
            return trajectory
        rewards = call_game(self.env._calculate_rewards, trajectory)  # pyright: ignore[reportPrivateUsage]
        if not isinstance(rewards, list) or len(cast("list[Any]", rewards)) != len(trajectory.token_ids):
            wanted = f"a list of {len(trajectory.token_ids)} rewards, one a token"
            given = len(cast("list[Any]", rewards)) if isinstance(rewards, list) else repr(rewards)
            raise EnvironmentFault(f"_calculate_rewards must return {wanted}, got {given}")
        as_number("the sum of _calculate_rewards", call_game(sum, rewards))
        return dataclasses.replace(trajectory, per_token_rewards=rewards)

    def _failed(self, fault: EpisodeFault) -> Trajectory:
        turn = len(self.conversation.turns)
        logger.warning("session %s failed at turn %d: %s", self.session_id, turn, fault)
        return self._trajectory(StopReason.FAILED, "".join(traceback.format_exception(fault)))


def call_game(hook: Callable[..., Any], *arguments: Any) -> Any:
    """Call a hook of the game; whatever it raises becomes an :class:`EnvironmentFault`, the cause attached."""
    try:
        return hook(*arguments)
    except Exception as error:
        name = getattr(hook, "__qualname__", repr(hook))
        raise EnvironmentFault(f"{name} raised {type(error).__name__}: {error}") from error


def _rewritten(history: Callable[[list[Message]], list[Message]], messages: list[Message]) -> list[Message]:
    shown = call_game(history, messages)
    if not is_conversation(shown) or shown[-1]["role"] == "assistant":
        raise EnvironmentFault(
            "env_config['history'] must return a list of messages that ends with what the agent is to answer, "
            f"got {shown!r}"
        )
    if not all(is_unicode(message["content"]) for message in shown):
        raise EnvironmentFault(f"env_config['history'] must return valid Unicode, got {shown!r}")
    return shown
