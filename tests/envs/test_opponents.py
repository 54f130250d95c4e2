"""Opponents in an environment of one's own: who plays which role, what is recorded, and what is rewarded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import (
    Action,
    Agent,
    ConfigError,
    MultistepEnv,
    RandomAgent,
    ScriptedAgent,
    TaskError,
    check_env,
    evaluate,
)
from agentsgym.envs import opponents
from agentsgym.envs.opponents import register_player
from agentsgym.testing import chat_tokenizer
from agentsgym.types import StopReason, TurnRequest

TASKS = [{"seed": seed} for seed in range(12)]


class Count(MultistepEnv):
    """A, B and C take turns to add 1, 2 or 3 to a sum; whoever reaches 10 wins, and a number that is none loses."""

    roles = ("A", "B", "C")
    closed: ClassVar[list[str]] = []

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "sum": 0, "turn": 0, "agent": task_data.get("role")}

    def _system_prompt(self) -> str:
        return "Count to ten."

    def _role(self, state: dict[str, Any]) -> str:
        return "ABC"[state["turn"] % 3]

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return f"{'You are ' + self._role(state) + '. ' if step == 0 else ''}{state['sum']}"

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        role = self._role(state)
        if action not in {"1", "2", "3"}:
            return state, 0.0, True, {"rewards": {one: -2.0 if one == role else 1.0 for one in "ABC"}}
        state = {**state, "sum": state["sum"] + int(action), "turn": state["turn"] + 1}
        rewards: dict[str, Any] = {role: {"added": int(action) / 100}}
        is_over = state["sum"] >= 10
        if is_over:
            rewards = {one: {"win": 2.0 if one == role else -1.0} for one in "ABC"}
        return state, 0.0, is_over, {"rewards": rewards}

    def _close_episode(self, session_id: str, state: dict[str, Any]) -> None:
        self.closed.append(session_id)


class Listening(Agent):
    """Answers always alike, and keeps the requests."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.prompts: dict[str, list[list[str]]] = {}
        self.num_finished = 0

    def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
        for request in requests:
            texts = [f"{message['role']}: {message['content']}" for message in request.messages]
            self.prompts.setdefault(request.session_id.partition("/")[2], []).append(texts)
        return [Action(text=self.answer) for _ in requests]

    def finish(self) -> None:
        self.num_finished += 1


def test_opponents_have_conversations_of_their_own_and_only_the_agents_is_recorded() -> None:
    other, agent = Listening("2"), Listening("1")
    [rollout] = Count(opponent=other).rollout([{"role": "B"}], agent)
    assert [(turn.role, turn.role_rewards) for turn in rollout.turns] == [("B", None)] * 2
    assert [one["content"] for one in rollout.messages] == ["Count to ten.", "You are B. 2", "1", "7", "1"]
    assert other.prompts["player A"] == [
        ["system: Count to ten.", "user: You are A. 0"],
        ["system: Count to ten.", "user: You are A. 0", "assistant: 2", "user: 5"],
    ]
    assert other.prompts["player C"][0] == ["system: Count to ten.", "user: You are C. 3"]
    assert (rollout.final_reward, rollout.success) == (pytest.approx(0.02 - 1), False)  # C reaches 10
    assert rollout.final_components == {"added": pytest.approx(0.02), "win": -1.0}
    assert other.num_finished == 1


@given(st.lists(st.sampled_from("123x"), min_size=12, max_size=12), st.sampled_from("ABC"))
def test_the_agent_gets_what_its_role_gets_in_the_same_game(moves: list[str], role: str) -> None:
    [whole] = Count().rollout([{}], ScriptedAgent(moves, repeat_last=True))
    by_role = {one: moves["ABC".index(one) :: 3] for one in "ABC"}
    others = {one: ScriptedAgent(by_role[one], repeat_last=True) for one in "ABC" if one != role}
    env = Count(opponent=others)
    [played] = env.rollout([{"role": role}], ScriptedAgent(by_role[role], repeat_last=True))
    if not any(turn.role == role for turn in whole.turns):  # the game was over before
        assert "before the agent's first turn in 10 attempts" in str(played.error)
        return
    assert played.final_reward == pytest.approx(whole.final_rewards[role])
    assert played.success == (whole.final_rewards[role] > max(v for k, v in whole.final_rewards.items() if k != role))
    own = [reward for turn, reward in zip(whole.turns, whole.turn_rewards, strict=True) if turn.role == role]
    assert played.turn_rewards == pytest.approx(own)


def test_roles_are_drawn_by_task_or_named_by_it_or_by_the_opponents() -> None:
    env, agent = Count(opponent=Listening("1")), Listening("1")
    rollouts = env.rollout(TASKS, agent, 2)
    drawn = [one.turns[0].role for one in rollouts]
    assert drawn[::2] == drawn[1::2]
    assert {*drawn} == {"A", "B", "C"}
    assert {one.turns[0].role for one in env.rollout([{**task, "role": "C"} for task in TASKS], agent)} == {"C"}
    only = Count(opponent={"A": Listening("1"), "B": Listening("1")})
    assert {one.turns[0].role for one in only.rollout(TASKS, agent)} == {"C"}
    with pytest.raises(TaskError, match="every role but the agent's, 'A': got none for 'C'"):
        only.rollout([{"role": "A"}], agent)


def test_an_agent_that_plays_itself_sees_each_roles_own_conversation() -> None:
    agent = Listening("3")
    [rollout] = Count(env_config={"opponent": "self"}).rollout([{}], agent)
    assert [turn.role for turn in rollout.turns] == ["A", "B", "C", "A"]
    assert agent.prompts[""][3] == ["system: Count to ten.", "user: You are A. 0", "assistant: 3", "user: 9"]
    assert agent.prompts[""][2] == ["system: Count to ten.", "user: You are C. 6"]
    tokenizer = chat_tokenizer("chatml")
    [exact] = Count(tokenizer, {"opponent": "self"}).rollout([{}], agent)
    for turn, prompt in zip(exact.turns, agent.prompts[""][:4], strict=True):
        text = tokenizer.decode(exact.token_ids[turn.prompt_start : turn.start])
        assert all(line.partition(": ")[2].split()[-1] in text for line in prompt)


def test_rows_name_opponents_and_evaluations_have_a_win_rate_for_each_role() -> None:
    register_player("drawing", lambda seed: RandomAgent(["1", "2", "3"], seed=seed))
    env = Count(env_config={"opponent": "drawing"})
    together = env.rollout(TASKS, RandomAgent(["1", "2", "3"], seed=1))
    apart = env.rollout(TASKS, RandomAgent(["1", "2", "3"], seed=1), max_concurrent=1)
    assert [one.messages for one in together] == [one.messages for one in apart]
    found = evaluate(env, RandomAgent(["1", "2", "3"]), [{"seed": seed} for seed in range(60)])
    assert found.win_rate is not None
    assert {*found.by_role} == {"A", "B", "C"}
    assert all(one.win_rate is not None and 0 < one.win_rate.mean < 1 for one in found.by_role.values())
    assert {*evaluate(Count(), RandomAgent(["1", "2", "3"]), TASKS).by_role} == {"A", "B", "C"}


class Odd(Agent):
    """Returns or raises what no agent should."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def act(self, requests: Sequence[TurnRequest]) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


ODD: list[Any] = [
    *(None, [], "1", [None], ["1"], [Action(text=1)], [Action(text="1")] * 2, [Action(text="1", token_ids=[-1])]),
    *(ValueError("lost"), StopIteration("lost"), KeyError("lost"), [Action(text="\ud800")]),
]


@pytest.mark.parametrize("answer", ODD, ids=map(repr, ODD))
def test_an_opponent_that_breaks_fails_its_own_episode_and_is_named(answer: Any) -> None:
    Count.closed.clear()
    env = Count(opponent={"A": Odd(answer), "B": Listening("1"), "C": Listening("1")})
    tasks = [{"role": "A"}, {"role": "B"}, {"role": "C"}]
    played, *failed = env.rollout(tasks, Listening("1"))
    assert played.stop_reason is StopReason.DONE
    for one in failed:
        assert one.stop_reason is StopReason.FAILED
        assert "Odd" in str(one.error)
    assert len(Count.closed) == 3
    assert not env.tables
    assert not env.active_states


def test_opponents_that_go_on_for_ever_end_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opponents, "MAX_MOVES", 20)

    class Stuck(Count):
        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            return {**state, "turn": state["turn"] + (state["turn"] == 0)}, 0.0, False, {}

    [rollout] = Stuck(opponent=Listening("1")).rollout([{"role": "A"}], Listening("1"))
    assert (rollout.stop_reason, rollout.error, rollout.success) == (StopReason.MAX_TURNS, None, False)
    [rollout] = Stuck(opponent=Listening("1")).rollout([{"role": "C"}], Listening("1"))
    assert "before the agent's first turn" in str(rollout.error)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("corner", "'corner' is not registered"),
        ("random", "'random' is not registered"),
        ({"Z": "self"}, "must be one of 'A', 'B', 'C', got 'Z'"),
        ({"A": "self"}, "must be only 'self' for the agent to play every role"),
        (3, "must be a registered name, 'self', names by role, or None, got 3"),
    ],
)
def test_opponents_that_cannot_play_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Count(env_config={"opponent": given})


def test_what_needs_roles_or_the_history_is_refused() -> None:
    class Alone(Count):
        roles = ()

    with pytest.raises(ConfigError, match="list them in the class attribute 'roles'"):
        Alone(opponent=Listening("1"))
    with pytest.raises(ConfigError, match="must be 'append' if the roles have separate conversations"):
        Count(env_config={"opponent": "self", "history": "rerender"})
    with pytest.raises(TaskError, match="must be one of 'A', 'B', 'C', or None to draw it, got 'Z'"):
        Count(opponent=Listening("1")).rollout([{"role": "Z"}], Listening("1"))

    class Lost(Count):
        def _role(self, state: dict[str, Any]) -> str:
            return "A" if state["turn"] == 0 else "D"

    [rollout] = Lost(opponent=Listening("1")).rollout([{"role": "A"}], Listening("1"))
    assert "_role must return one of 'A', 'B', 'C', got 'D'" in str(rollout.error)


@pytest.mark.parametrize("opponent", [None, "self", "drawing"])
def test_a_game_that_may_end_before_a_role_moves_passes_the_check(opponent: Any) -> None:
    register_player("drawing", lambda seed: RandomAgent(["1", "2", "3", "x"], seed=seed))
    report = check_env(Count(env_config={"opponent": opponent}), TASKS, RandomAgent(["1", "x"]), raise_on=None)
    assert not report.errors, str(report)
    assert not [one for one in report.findings if one.check == "roles"], str(report)


class Undeclared(Count):
    roles = ()


def test_without_listed_roles_an_early_end_is_a_warning_and_a_misspelled_role_an_error() -> None:
    early = check_env(Undeclared(), TASKS, RandomAgent(["x"]), raise_on=None)
    [*warnings] = [one for one in early.findings if one.check == "roles"]
    assert {one.severity for one in warnings} == {"warning"}
    assert "list all of them in the class attribute 'roles'" in warnings[0].text

    class Misspelled(Undeclared):
        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            state, reward, done, info = super()._step_episode(session_id, state, action)
            return state, reward, done, {"rewards": {role.lower(): one for role, one in info["rewards"].items()}}

    report = check_env(Misspelled(), TASKS, RandomAgent(["1"]), raise_on=None)
    assert any("role names must match exactly" in one.text for one in report.errors), str(report)


def test_a_fork_replays_the_opponents() -> None:
    register_player("drawing", lambda seed: RandomAgent(["1", "2", "3"], seed=seed))
    env, agent = Count(env_config={"opponent": "drawing"}), RandomAgent(["1", "2", "3"], seed=5)
    for rollout, turn in itertools.product(env.rollout(TASKS[:4], agent), range(2)):
        [forked] = env.fork(rollout, min(turn, len(rollout.turns) - 1), agent)
        kept = 2 * min(turn, len(rollout.turns) - 1) + 2
        assert forked.messages[:kept] == rollout.messages[:kept]
