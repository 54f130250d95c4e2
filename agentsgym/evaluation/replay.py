"""Replay the actions of a recorded rollout in its environment, and find the first difference.

A record contains the task with its seed and the agent's actions; the environment reproduces everything else. A
difference means that the environment's code or data, or a package or server that it uses, has changed, or that it draws
random numbers from a source other than ``self.rng``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, cast

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.conversation import Budget
from agentsgym.envs.datasets.environments import make
from agentsgym.envs.differences import Difference, first_difference
from agentsgym.envs.forks import recorded_action
from agentsgym.errors import AgentError, ConfigError, MissingDependencyError, TaskError, TemplateError
from agentsgym.fields import check_rollout
from agentsgym.judging.scores import recorded_scores, with_scores
from agentsgym.store.records import StoredRollout
from agentsgym.store.values import Unkept, to_json
from agentsgym.texts import sentence_of, shown
from agentsgym.types import FinishReason, StopReason, Trajectory

_NOT_PLAYABLE = (ConfigError, TaskError, TemplateError, MissingDependencyError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result of replaying a recorded rollout.

    Attributes:
        recorded: The recorded rollout.
        played: The replay, up to the last recorded action; None if the rollout cannot be replayed.
        difference: The first difference between the two; None if there is none.
        impossible: The reason why the rollout cannot be replayed, as a sentence; None if it can.
    """

    recorded: Trajectory
    played: Trajectory | None = None
    difference: Difference | None = None
    impossible: str | None = None

    @property
    def outcome(self) -> Literal["same", "differs", "impossible"]:
        """The outcome in one word."""
        if self.impossible is not None:
            return "impossible"
        return "same" if self.difference is None else "differs"

    def as_dict(self) -> dict[str, Any]:
        """Return the rollout's identity and the outcome as plain JSON values."""
        return {
            "session_id": self.recorded.session_id,
            "task_index": self.recorded.task_index,
            "rollout_index": self.recorded.rollout_index,
            "outcome": self.outcome,
            "difference": None if self.difference is None else self.difference._asdict(),
            "impossible": self.impossible,
        }


def replay(rollout: StoredRollout | Trajectory, env: MultistepEnv | None = None) -> Replay:
    """Replay the recorded actions with the recorded task and seed, and compare turn by turn.

    The comparison covers the observations before each turn, the role, whether the action was invalid, the reward, and
    finally the stop reason, ``info["success"]`` and the final reward. It ignores tokens, and the end of a rollout in
    which the agent failed or reached a token limit: there the environment only needs to continue as recorded.

    If the environment has the recorded rollout's tokenizer, tool calls are parsed again from the recorded token ids;
    otherwise, actions consist of the recorded text and tool calls.

    Args:
        rollout: A record from a store (``store.record(i)``), or a trajectory.
        env: The environment; by default the one that the record names, if it is built in or registered. No other code
            is imported.

    Raises:
        ConfigError: ``rollout`` is a trajectory and ``env`` is None.
    """
    if isinstance(env, type):
        raise ConfigError(f"env must be an environment, got the class {env.__name__}: pass {env.__name__}()")
    check_rollout("replay(rollout)", getattr(rollout, "trajectory", rollout))
    if isinstance(rollout, Trajectory) and env is None:
        raise ConfigError("a trajectory does not name its environment: pass both, as in replay(trajectory, env)")
    record = StoredRollout(trajectory=rollout) if isinstance(rollout, Trajectory) else rollout
    [result] = replay_all([record], env)
    return result


def replay_all(
    rollouts: Iterable[StoredRollout], env: MultistepEnv | Callable[[StoredRollout], MultistepEnv] | None = None
) -> Iterator[Replay]:
    """Replay records one after another, lazily.

    Args:
        rollouts: The records.
        env: One environment for all records, or a function from a record to its environment; by default
            :class:`RecordEnvironments`.
    """
    env_of = RecordEnvironments() if env is None else env
    for record in rollouts:
        try:
            yield _replay(record.trajectory, env_of if isinstance(env_of, MultistepEnv) else env_of(record))
        except _NOT_PLAYABLE as error:
            yield Replay(recorded=record.trajectory, impossible=sentence_of(error))


class RecordEnvironments:
    """Builds the environments of records, without a tokenizer; equal environments are built once."""

    def __init__(
        self, env_class: type[MultistepEnv] | None = None, env_config: Mapping[str, Any] | None = None
    ) -> None:
        """Set up without building an environment.

        Args:
            env_class: The class of all environments; by default the one that a record names.
            env_config: Values that replace those in the records, by key.
        """
        self._env_class, self._env_config = env_class, dict(env_config or {})
        self._made: dict[tuple[str | None, str], MultistepEnv] = {}

    def __call__(self, record: StoredRollout) -> MultistepEnv:
        """Return the environment of a record, built on first use."""
        path, config = record.env_class_path, {**(record.env_config or {}), **self._env_config}
        unkept = _unkept(config)
        if unkept is not None:
            raise ConfigError(
                f"the rollout's env_config contained {unkept}, which cannot be stored: pass the environment yourself "
                "(--env on the command line)"
            )
        key = (path, to_json(config))
        if key not in self._made:
            if self._env_class is not None:
                self._made[key] = self._env_class(None, config)
            elif path is None:
                raise ConfigError("the record does not name its environment")
            else:
                self._made[key] = make({"env_class_path": path, "env_config": config})
        return self._made[key]


def _unkept(value: Any) -> str | None:
    """Describe a value, at any depth, that could not be stored; None if there is none."""
    if isinstance(value, Unkept):
        return f"{shown(value.text, 80)} (of type {value.type_name})"
    if isinstance(value, Mapping):
        value = [*cast("Mapping[Any, Any]", value).values()]
    if isinstance(value, list | tuple | set | frozenset):
        return next((found for one in cast("Sequence[Any]", value) if (found := _unkept(one)) is not None), None)
    return None


def _replay(recorded: Trajectory, env: MultistepEnv) -> Replay:
    if any(line.startswith("JudgeError:") for line in (recorded.error or "").splitlines()[:2]):
        raise ConfigError("a judge failed this rollout, so its rewards and its end were not recorded")
    episodes = _episodes(recorded, env)
    _check_task(recorded, env)
    finishes: list[FinishReason] = ["stop"] * len(recorded.turns)
    played, continues = _play(recorded, env, episodes, finishes)
    difference = first_difference(recorded, played, continues=continues)
    while difference is not None and env.overrides_step_action:
        # Records do not contain whether an action was truncated, which this environment takes into account.
        turn = _action_before(difference)
        if turn < 0 or finishes[turn] == "length":
            break
        finishes[turn] = "length"
        other, continues = _play(recorded, env, episodes, finishes)
        later = first_difference(recorded, other, continues=continues)
        if later is not None and _action_before(later) <= turn:
            break
        played, difference = other, later
    if difference is not None and _may_hide_calls(recorded, env, _action_before(difference)):
        raise ConfigError(
            f"the tool calls of turn {_action_before(difference)} can be recovered only from its tokens: pass an "
            "environment with the tokenizer of the recorded rollout"
        )
    return Replay(recorded=recorded, played=played, difference=difference)


def _action_before(difference: Difference) -> int:
    """Return the turn whose action led to the difference; -1 if no action preceded it."""
    return difference.turn - (difference.what == "observation")


def _may_hide_calls(recorded: Trajectory, env: MultistepEnv, turn: int) -> bool:
    """Whether an action may contain unreadable tool calls, which its message omits."""
    if not env.overrides_step_action or env.tokenizer is not None or turn < 0:
        return False
    known = recorded.turns[turn]
    return known.exact and known.stop > known.start and not recorded.messages[known.message_index].get("tool_calls")


def _episodes(recorded: Trajectory, env: MultistepEnv) -> range | None:
    """Return the episodes of the trial that were recorded; None for all."""
    config = env.env_config
    if config["keep_history"] or config["episodes_per_trial"] == 1:
        return None
    if recorded.turns:
        return range(recorded.turns[0].episode, recorded.turns[0].episode + 1)
    if recorded.failed:
        raise ConfigError(
            "the rollout failed before its first turn, so it is unknown which of its episodes was recorded"
        )
    return range(config["episodes_per_trial"] - 1, config["episodes_per_trial"])


def _check_task(recorded: Trajectory, env: MultistepEnv) -> None:
    if type(env).rollout is not MultistepEnv.rollout:
        raise ConfigError(f"{type(env).__name__} overrides rollout, so its rollouts cannot be reproduced from records")
    if recorded.seed is None:
        raise TaskError("the record does not contain the task with its seed")
    unkept = _unkept(recorded.task_data)
    if unkept is not None:
        raise TaskError(f"the rollout's task_data contained {unkept}, which cannot be stored")


class _ExhaustedBudget(Budget):
    """A token budget that allows no further action."""

    def room(self, *, length: int, prompt_length: int) -> int | None:
        """Return 0, the number of tokens allowed for the next action."""
        del length, prompt_length
        return 0


def _play(
    recorded: Trajectory, env: MultistepEnv, episodes: range | None, finishes: Sequence[FinishReason]
) -> tuple[Trajectory, bool]:
    """Return the replay, and whether the environment requests more actions than were recorded."""
    [trial] = env.trials([{"task_data": recorded.task_data}])
    note_turns = recorded.info.get("note_turns")
    trial.note_turns = note_turns if isinstance(note_turns, list) else None
    trial.episodes = episodes
    trial.task_index, trial.rollout_index = recorded.task_index, recorded.rollout_index
    last = len(recorded.turns) - 1
    # Token limits are not recorded, so the budget is exhausted at the turn where they ended the rollout.
    is_cut = recorded.stop_reason is StopReason.MAX_TOKENS
    with closing(trial.play()) as episode:
        try:
            if last < 0 and is_cut:
                trial.budget = _ExhaustedBudget()
            next(episode)
            for turn in range(last + 1):
                action = recorded_action(recorded, turn, finishes[turn], has_tokens=env.chat_format is not None)
                if turn == last and is_cut:
                    trial.budget = trial.exchange.budget = _ExhaustedBudget()
                episode.send(action)
        except StopIteration as end:
            played: Trajectory = end.value
            scores = recorded_scores(recorded.info)  # judges are not asked again
            if scores and not played.failed and all(turn is None or turn < len(played.turns) for turn, _ in scores):
                played = with_scores(played, scores)
            return played, False
        return trial.abandon(AgentError("the record has no further action")), True
