"""Continue a rollout from one of its turns, any number of times, by replaying the actions before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentsgym.agents.base import Agent
from agentsgym.errors import AgentError, ConfigError, EnvError, TaskError
from agentsgym.fields import check_rollout, is_int, require
from agentsgym.texts import shown
from agentsgym.types import Action, FinishReason, StopReason, ToolCall, Trajectory, TurnRequest

if TYPE_CHECKING:
    from agentsgym.tokens.chat_format import ChatFormat


def fork(env: Any, trajectory: Trajectory, turn: int, agent: Agent, num_forks: int, **options: Any) -> list[Trajectory]:
    """Play forks in a :class:`~agentsgym.envs.base.MultistepEnv`: see its method ``fork``."""
    check_rollout("fork(trajectory)", trajectory)
    most = len(trajectory.turns)
    require("turn", turn, lambda it: is_int(0)(it) and it <= most, f"an int from 0 to {most}, the rollout's turns")
    if trajectory.seed is None:
        raise TaskError("the rollout does not contain its task with its seed, so it cannot be forked")
    if env.env_config["episodes_per_trial"] > 1 and not env.env_config["keep_history"]:
        raise ConfigError("a fork of a trial of several episodes requires env_config['keep_history'] = True")
    if env.exchange_class.may_wait:
        raise ConfigError(f"{type(env).__name__} cannot be forked, since the calls of a program cannot be replayed")
    branching = _Branching(env, trajectory, turn, agent)
    forks: list[Trajectory] = env.rollout([trajectory.task_data], branching, num_forks, **options)
    return [branching.checked(one) for one in forks]


class _Branching(Agent):
    """Repeats the first actions of a recorded rollout in each session, and then lets another agent play."""

    def __init__(self, env: Any, trajectory: Trajectory, turn: int, agent: Agent) -> None:
        self._env, self._trajectory, self._turn, self._agent = env, trajectory, turn, agent
        chat_format: ChatFormat | None = env.chat_format
        reasons: list[FinishReason] = [_finish_reason(trajectory, k, chat_format) for k in range(turn)]
        self._actions = [
            recorded_action(trajectory, k, reason, has_tokens=chat_format is not None)
            for k, reason in enumerate(reasons)
        ]
        self._difference: str | None = None

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Answer with the recorded actions as long as there are some, and with the agent's after that."""
        states: list[tuple[int, Any]] = [request.agent_state or (0, None) for request in requests]
        answers: dict[int, Action | AgentError] = {}
        live = [place for place, (k, _) in enumerate(states) if k >= self._turn]
        for place, (k, _) in enumerate(states):
            if k < self._turn:
                answers[place] = self._recorded(k, requests[place])
        if live:
            own = [replace(requests[place], agent_state=states[place][1]) for place in live]
            answers |= dict(zip(live, self._agent.act(own), strict=True))
        return [
            replace(answer, agent_state=(k + 1, answer.agent_state)) if isinstance(answer, Action) else answer
            for (_, answer), (k, _) in zip(sorted(answers.items()), states, strict=True)
        ]

    def finish(self) -> None:
        """Let the agent free its resources."""
        self._agent.finish()

    def _recorded(self, k: int, request: TurnRequest) -> Action | AgentError:
        """Return the recorded action of turn k; an error if the prompt is not the recorded one."""
        own, turn = self._trajectory, self._trajectory.turns[k]
        if request.token_ids and own.token_ids:
            is_same = [*request.token_ids] == [*own.token_ids[turn.prompt_start : turn.start]]
        else:
            shown_before = own.messages[: turn.message_index] if turn.prompt_messages is None else turn.prompt_messages
            is_same = [one["content"] for one in request.messages] == [one["content"] for one in shown_before]
        if is_same:
            return self._actions[k]
        last = shown(request.messages[-1]["content"], 80)
        self._difference = f"the prompt of turn {k} differs from the recorded one, and ends with {last}"
        return AgentError(self._difference)

    def checked(self, fork: Trajectory) -> Trajectory:
        """Return a fork with ``info["fork"]``, the rollout and the turn that it was forked from.

        Raises:
            EnvError: The turns before the fork differ from the recorded ones.
        """
        is_judged = bool(getattr(self._env, "judges", ()))
        reason = self._difference or _difference(self._trajectory, fork, self._turn, is_judged=is_judged)
        if reason is not None:
            is_cut = self._trajectory.stop_reason is StopReason.MAX_TOKENS
            limits = "a limit of tokens ended it, which must be passed again (max_turn_tokens, max_completion_length)"
            remedy = limits if is_cut else "draw random numbers from self.rng(session_id), and see agentsgym check"
            raise EnvError(
                f"{type(self._env).__name__} does not replay a recorded rollout, so it cannot be forked: {reason}; "
                f"{remedy}"
            )
        origin = {"rollout": self._trajectory.rollout_index, "turn": self._turn}
        return replace(fork, info={**fork.info, "fork": origin})


def _finish_reason(recorded: Trajectory, k: int, chat_format: ChatFormat | None) -> FinishReason:
    """Infer from the tokens whether turn k was truncated; an answer with tool calls was not."""
    turn = recorded.turns[k]
    ids = recorded.token_ids[turn.start : turn.stop]
    is_ended = chat_format is None or not ids or chat_format.ended_by(ids, "length") is not None
    if chat_format is None or is_ended or recorded.messages[turn.message_index].get("tool_calls"):
        return "stop"
    if chat_format.ended_by(ids, "stop") is None:
        return "length"
    # The answer ends with a special token, which ended it unless its end of turn was added.
    end = turn.stop + len(chat_format.end_of_thought(ids))
    following = recorded.token_ids[end : end + 1]
    return "length" if following and following[0] in chat_format.stop_token_ids else "stop"


def _difference(recorded: Trajectory, forked: Trajectory, turn: int, *, is_judged: bool) -> str | None:
    """Describe the first difference in the turns before a fork; None without. Judges may grade a turn anew."""
    if len(forked.turns) < turn:
        return f"it ended after {len(forked.turns)} of {turn} turns" + (f": {forked.error}" if forked.error else "")
    for k in range(0 if is_judged else turn):
        before, after = recorded.turns[k], forked.turns[k]
        # The reward of a role's turn includes those up to its next turn, which may follow the fork.
        given, found = ((one.role_rewards, None if one.role_rewards else one.reward) for one in (before, after))
        if given != found:
            return f"turn {k} was rewarded with {shown(found)} instead of {shown(given)}"
    return None


def recorded_action(
    recorded: Trajectory, index: int, finish_reason: FinishReason = "stop", *, has_tokens: bool
) -> Action:
    """Rebuild the agent's action in a turn, with token ids if the record has them and the environment uses them."""
    turn = recorded.turns[index]
    message = recorded.messages[turn.message_index]
    has_ids = has_tokens and turn.exact and turn.stop > turn.start
    calls: list[ToolCall] = []
    for call in () if has_ids else message.get("tool_calls", ()):
        function = call["function"]
        calls.append(ToolCall(name=function["name"], arguments=function["arguments"], id=call.get("id")))
    return Action(
        text=message["content"],
        token_ids=[*recorded.token_ids[turn.start : turn.stop]] if has_ids else None,
        logprobs=[*recorded.logprobs[turn.start : turn.stop]] if has_ids and recorded.logprobs is not None else None,
        tool_calls=calls,
        reasoning=message.get("reasoning_content"),
        finish_reason=finish_reason,
        policy_version=turn.policy_version,
        written=message.get("written", ""),
    )
