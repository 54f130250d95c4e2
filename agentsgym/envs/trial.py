"""Play one trial: a generator that yields a request to the driver and receives the agent's action.

::

    for episode in range(episodes_per_trial):
        env.start_session(...)                        # _initialize_episode returns the state
        for step in range(max_steps_per_episode):
            messages = env._format_prompt(state, step)  # only new messages
            transcript.observe(messages)              # as tokens, including the generation prompt
            if no tokens are left for an action:      # max_trajectory_tokens, max_completion_length
                stop with MAX_TOKENS
            action = yield TurnRequest(...)           # the driver calls the agent
            start, stop = transcript.act(action)      # the sampled ids, unchanged
            state, reward, done, info = env._step_action(session_id, state, action)  # by default _step_episode
            turns.append(Turn(start=start, stop=stop, reward=reward, ...))
            if done or too many actions were invalid:
                stop with DONE or INVALID
        if tokens were left:
            env._last_message(state)                  # the environment's last message; recorded, never trained on
        final_reward += env._final_reward(state, rewards)   # unless info["rewards"] has rewards by role
        env._close_episode(session_id, state)         # whatever ended it
    return Trajectory(...)                            # _calculate_rewards returns one reward per token
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentsgym.credit.components import attribute_rewards, role_components, sum_components
from agentsgym.envs.boundary import Step, as_messages, call_environment, is_unicode, token_rewards, without_rewards
from agentsgym.envs.contract import PlayableEnv, State
from agentsgym.envs.conversation import Budget, Conversation
from agentsgym.envs.exchange import Exchange
from agentsgym.envs.state_scores import StateScores
from agentsgym.envs.user_checks import place_of_hook
from agentsgym.errors import EnvError, EpisodeError, TemplateError
from agentsgym.failures import FailureLog, describe
from agentsgym.texts import shown
from agentsgym.types import Action, Message, StopReason, Trajectory, TurnRequest

# pyright: reportPrivateUsage=false
# The hooks are private for users of an environment; trials call them.

logger = logging.getLogger(__name__)

_NOTHING = Step()


@dataclass(slots=True, kw_only=True)
class Trial:
    """One session, which plays the episodes of one task in sequence.

    Attributes:
        env: The environment whose hooks are called.
        session_id: Key of the session's state in ``env.active_states``.
        task_data: The task.
        seed: The task group's seed, from which every episode's generator is derived.
        budget: The token limits.
        task_index: Index of the task in the list passed to ``rollout``.
        rollout_index: Index among the rollouts of that task.
        num_retries: Number of failed attempts before this one.
        episodes: Indices of the episodes to play; None for all.
        note_turns: Indices of the turns in which notes are written, in a replay; None to decide by the prompt's length.
        exchange: What plays and records the turns; of the last episode alone unless ``keep_history`` is set.
        conversation: Its record.
        num_close_errors: Number of exceptions from ``_close_episode``.
        place: Indices of the current episode and turn; None before the first.
        failures: Logs exceptions from ``_close_episode``.
    """

    env: PlayableEnv
    session_id: str
    task_data: dict[str, Any] = field(default_factory=dict[str, Any])
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    task_index: int = 0
    rollout_index: int = 0
    num_retries: int = 0
    episodes: range | None = None
    note_turns: Sequence[int] | None = None
    exchange: Exchange = field(init=False)
    conversation: Conversation = field(init=False)
    num_close_errors: int = field(default=0, init=False)
    place: tuple[int | None, int | None] = field(default=(None, None), init=False)
    failures: FailureLog = field(default_factory=partial(FailureLog, logger), init=False)

    @property
    def may_wait(self) -> bool:
        """Whether a step may wait for other trials."""
        return self.env.exchange_class.may_wait

    def play(self) -> Generator[TurnRequest, Action, Trajectory]:
        """Play every episode; an error ends the trial with stop reason ``failed``, and earlier turns are kept."""
        config, stop_reason = self.env.env_config, StopReason.DONE
        try:
            for episode in range(config["episodes_per_trial"]) if self.episodes is None else self.episodes:
                if not config["keep_history"] or self.place[0] is None:
                    self._begin_record()
                self._close()  # the previous episode
                self.env.active_states.pop(self.session_id, None)  # not to be closed again if the next cannot start
                self.place = (episode, None)
                self.env.start_session(self.session_id, self.task_data, self.seed, episode)
                stop_reason = yield from self._episode(episode, is_practice=episode < config["free_shots"])
                if config["keep_history"] and stop_reason is StopReason.MAX_TOKENS:
                    break  # the next episode would continue a conversation without tokens left
            trajectory = self._ended(stop_reason)
        except EpisodeError as fault:
            fault.place = fault.place or place_of_hook(type(self.env), str(fault))
            trajectory = self._trajectory(StopReason.FAILED, describe(fault, self._where()))
        finally:  # also when the driver closes this generator, after an interrupt or a timeout
            try:
                self._close()
            finally:
                self.env.drop_session(self.session_id)
        return self._closed(trajectory)

    def abandon(self, fault: EpisodeError) -> Trajectory:
        """Return the trajectory of a trial whose generator cannot continue: failed, with the turns recorded so far.

        A step may still be running in another thread; the trajectory does not contain anything that it records later.
        """
        if self.place[0] is None:  # nothing was played
            self._begin_record()
        return self._trajectory(StopReason.FAILED, describe(fault, self._where()))

    def __reduce__(self) -> tuple[Callable[..., Trial], tuple[type[Trial], dict[str, Any]]]:
        """Support pickling of a trial that has not started, to send it to another process."""
        return _unpickled_trial, (
            type(self),
            {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.init},
        )

    def _begin_record(self) -> None:
        self.exchange = self.env.exchange_class(
            self.env, self.session_id, task_data=self.task_data, budget=self.budget, note_turns=self.note_turns
        )
        self.conversation = self.exchange.conversation

    def _close(self) -> None:
        """Close the live episode, if any; an error is counted but does not change the result."""
        state = self.env.active_states.get(self.session_id)
        if state is None:
            return
        try:
            self.env.close_session(self.session_id, state)
        except EnvError as error:
            self.num_close_errors += 1
            self.failures.note_close_error(self.session_id, describe(error, self._where()))

    def _episode(self, episode: int, *, is_practice: bool) -> Generator[TurnRequest, Action, StopReason]:
        env, exchange, conversation = self.env, self.exchange, self.conversation
        config, states, session_id = env.env_config, env.active_states, self.session_id
        conversation.info = {}  # a success in practice does not carry over to this episode
        scores = StateScores(env, states[session_id]) if env.overrides_score_state and not is_practice else None
        stop_reason, num_invalid, first = StopReason.MAX_TURNS, 0, len(conversation.turns)
        rewards: list[float] = []
        for step in range(config["max_steps_per_episode"]):
            self.place = (episode, step)
            state = states[session_id]
            outcome = exchange.observe(state, step)
            if outcome is None:
                if conversation.notes is not None:
                    yield from exchange.note(state, step, episode)
                room = exchange.room()
                if room is not None and room <= 0:
                    stop_reason = StopReason.MAX_TOKENS
                    break
                conversation.last_messages = []
                action = exchange.record((yield exchange.request(state, episode, room)), room)
                outcome = self._step(state, action, scores, is_practice=is_practice)
            rewards.append(outcome.reward)
            num_invalid += outcome.invalid
            if outcome.done:
                stop_reason = StopReason.MAX_TURNS if outcome.truncated else StopReason.DONE
                break
            if num_invalid > config["error_allowance"]:
                stop_reason = StopReason.INVALID
                break
        if stop_reason is not StopReason.MAX_TOKENS:
            conversation.last_messages = self._last_messages()
        self._reward(rewards, scores, first, is_practice=is_practice)
        return stop_reason

    def _step(self, state: State, action: Action, scores: StateScores | None, *, is_practice: bool) -> Step:
        """Pass an action to the environment, and record the turn, even if the environment raises."""
        outcome = _NOTHING
        try:
            outcome = self.exchange.step(state, action)
            if scores is not None:
                outcome = scores.credited(outcome, self.env.active_states[self.session_id])
        finally:
            if is_practice:
                outcome = without_rewards(outcome)
            self.conversation.turns.append(self.exchange.turn(outcome))
        return outcome

    def _reward(self, rewards: list[float], scores: StateScores | None, first: int, *, is_practice: bool) -> None:
        """Add the rewards of an episode, whose turns begin at index ``first``."""
        conversation = self.conversation
        if scores is not None and rewards:
            place = conversation.last_turn()
            last = conversation.turns[place] = scores.closed(conversation.turns[place])
            rewards[-1] = last.reward
        if not is_practice:
            self.exchange.reward_episode(conversation.turns[first:], rewards)

    def _last_messages(self) -> list[Message]:
        """Return the environment's last message of an episode, as a list; empty if there is none."""
        returned = call_environment(self.env._last_message, self.env.active_states[self.session_id])
        if returned is None:
            return []
        messages = as_messages(returned, "_last_message")
        if not all(is_unicode(message["content"]) for message in messages):
            raise EnvError(f"_last_message must return valid Unicode, got {shown(messages)}")
        return messages

    def _ended(self, stop_reason: StopReason) -> Trajectory:
        """Record the last message, and return the trajectory."""
        try:
            self.conversation.close(self.budget)
        except TemplateError as error:
            raise EnvError(f"_last_message cannot be recorded: {error}") from error
        return self._trajectory(stop_reason)

    def _trajectory(self, stop_reason: StopReason, error: str | None = None) -> Trajectory:
        conversation = self.conversation
        # before the tokens: both may still grow if the trial was abandoned, so all spans lie within them
        turns, final_rewards = attribute_rewards([*conversation.turns])
        token_ids = [*conversation.token_ids()]
        final_reward = final_rewards[turns[0].role] if final_rewards else conversation.final_reward
        notes, info = conversation.notes, conversation.info
        if notes is not None:
            info = {**info, "num_notes": len(notes.note_turns), "note_turns": [*notes.note_turns]}
        if conversation.num_calls or conversation.has_tools:
            info = {**info, "calls_read": {**conversation.num_calls}}
        final_components = sum_components(conversation.final_parts)
        if final_rewards:
            final_components = role_components(turns).get(turns[0].role)
        rewards = [0.0] * len(token_ids)
        trajectory = Trajectory(
            token_ids=token_ids,
            turns=turns,
            messages=[*conversation.transcript.messages],
            final_reward=0.0 if error else final_reward,
            final_rewards={} if error else final_rewards,
            final_components=None if error else final_components,
            stop_reason=stop_reason,
            logprobs=conversation.token_logprobs(len(token_ids)),
            per_token_rewards=rewards,
            session_id=self.session_id,
            task_index=self.task_index,
            rollout_index=self.rollout_index,
            num_retries=self.num_retries,
            info=info,
            task_data=self.task_data,
            error=error,
        )
        if not error:
            rewards[:] = token_rewards(self.env, trajectory)
        return trajectory

    def _closed(self, trajectory: Trajectory) -> Trajectory:
        num_errors = self.num_close_errors
        return dataclasses.replace(trajectory, num_close_errors=num_errors) if num_errors else trajectory

    def _where(self) -> str:
        """Describe the rollout and the current turn for error messages."""
        parts = [f"task {self.task_index}", f"rollout {self.rollout_index}"]
        episode, turn = self.place
        if episode is not None and self.env.env_config["episodes_per_trial"] > 1:
            parts.append(f"episode {episode}")
        if turn is not None:
            parts.append(f"turn {turn}")
        return f"{', '.join(parts)} of {type(self.env).__name__}"


_WORKER_FAILURES = FailureLog(logger)  # one log for all trials that are sent to this worker process


class SessionTrial(Trial):
    """One episode of a session whose state is in ``env.active_states``."""

    def play(self) -> Generator[TurnRequest, Action, Trajectory]:
        """Play the episode; errors are raised."""
        self._begin_record()
        try:
            stop_reason = yield from self._episode(0, is_practice=False)
            trajectory = self._ended(stop_reason)
        finally:
            self._close()
        return self._closed(trajectory)


def _unpickled_trial(trial_class: type[Trial], fields: dict[str, Any]) -> Trial:
    trial = trial_class(**fields)
    trial.failures = _WORKER_FAILURES
    return trial
