"""Scores of states: each turn is rewarded for the change, and potential-based scores change no optimal policy."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, ClassVar

import pytest

from agentsgym import (
    ConfigError,
    EnvError,
    GRPOEnvConfig,
    MultistepEnv,
    ScriptedAgent,
    StopReason,
    Trajectory,
    check_env,
)
from agentsgym.testing import chat_tokenizer
from agentsgym.training.validation import check_environment

MOVES = ("1", "2", "no")


class Walk(MultistepEnv):
    """Steps of 1 and 2, from place 1 unless the task names another; place 3 is rewarded, and place 5 is the end."""

    default_config: ClassVar = {"max_steps_per_episode": 4}

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "place": task_data.get("start", 1)}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return f"place {state['place']}"

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        if action == "no":
            return state, -0.5, False, {"invalid": True, "place": state["place"]}
        place = state["place"] + int(action)
        return {**state, "place": place}, float(place == 3), place >= 5, {"place": place}


class ScoredWalk(Walk):
    """The score of a place is a tenth of its square."""

    def _score_state(self, state: dict[str, Any]) -> Any:
        return state["place"] ** 2 / 10


def play(env: MultistepEnv, actions: tuple[str, ...], **task: Any) -> Trajectory:
    [played] = env.rollout([{"seed": 0, **task}], ScriptedAgent([*actions], repeat_last=True))
    return played


def test_each_turn_is_rewarded_for_the_change() -> None:
    played = play(ScoredWalk(), ("1", "1", "2"))
    assert [turn.reward for turn in played.turns] == pytest.approx([0.3, 1.5, 1.6])
    assert [(turn.components or {})["progress"] for turn in played.turns] == pytest.approx([0.3, 0.5, 1.6])
    assert played.final_reward == pytest.approx(1 + (25 - 1) / 10)
    assert played.final_components == {"reward": pytest.approx(1.0), "progress": pytest.approx(2.4)}


@pytest.mark.parametrize("credit", ["change", "potential"])
@pytest.mark.parametrize("actions", [*itertools.product(MOVES, repeat=4)])
def test_what_scores_add_to_an_episode_depends_on_its_ends_alone(credit: str, actions: tuple[str, ...]) -> None:
    plain, scored = play(Walk(), actions), play(ScoredWalk(env_config={"state_scores": credit}), actions)
    assert (scored.stop_reason, len(scored.turns)) == (plain.stop_reason, len(plain.turns))
    last = 0.0 if credit == "potential" else scored.info["place"] ** 2 / 10
    assert scored.final_reward - plain.final_reward == pytest.approx(last - 0.1)
    assert sum(scored.turn_rewards) == pytest.approx(scored.final_reward)


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.5])
def test_a_potential_adds_the_same_to_every_discounted_return(discount: float) -> None:
    """All policies are enumerated, as sequences of actions: the same addition keeps every best one best."""
    config = {"state_scores": "potential", "score_discount": discount}
    cases: list[Any] = [(actions, {}, None) for actions in itertools.product(MOVES, repeat=4)]
    cases += [
        ((*actions, "1"), {"max_trajectory_tokens": 45}, chat_tokenizer()) for actions in (("1", "1"), ("1", "2"))
    ]
    ends: set[StopReason] = set()
    for actions, more, tokenizer in cases:
        plain = play(Walk(tokenizer, more), actions)
        scored = play(ScoredWalk(tokenizer, config | more), actions)
        returns = [sum(discount**k * reward for k, reward in enumerate(one.turn_rewards)) for one in (plain, scored)]
        assert returns[1] - returns[0] == pytest.approx(-0.1)
        ends.add(scored.stop_reason)
    assert ends == {StopReason.DONE, StopReason.MAX_TURNS, StopReason.INVALID, StopReason.MAX_TOKENS}


@pytest.mark.parametrize(("estimator", "wanted"), [("return_to_go", 0.9), ("grpo", 1.0)])
def test_another_discount_than_that_of_the_scores_is_refused(estimator: str, wanted: float, tmp_path: Any) -> None:
    args = GRPOEnvConfig(output_dir=str(tmp_path), use_cpu=True, advantage_estimator=estimator, discount=0.9)
    for own in (1.0, 0.9, 0.5):
        env = ScoredWalk(env_config={"state_scores": "potential", "score_discount": own})
        if own == wanted:
            check_environment(env, args, set())
        else:
            with pytest.raises(ConfigError, match=rf"'score_discount'\] = {own} must be .* which is {wanted}"):
                check_environment(env, args, set())
    check_environment(ScoredWalk(), args, set())


def test_a_fork_of_a_rollout_that_was_cut_names_the_limit() -> None:
    env = ScoredWalk(chat_tokenizer(), {"state_scores": "potential"})
    agent = ScriptedAgent(["1"], repeat_last=True)
    [cut] = env.rollout([{"seed": 0}], agent, max_completion_length=20)
    assert cut.stop_reason is StopReason.MAX_TOKENS
    with pytest.raises(EnvError, match="a limit of tokens ended it, which must be passed again"):
        env.fork(cut, len(cut.turns), agent)
    [fork] = env.fork(cut, len(cut.turns), agent, max_completion_length=20)
    assert fork.turn_rewards == cut.turn_rewards


def test_every_way_to_end_occurs_among_these_episodes() -> None:
    ends = {play(Walk(), actions).stop_reason for actions in itertools.product(MOVES, repeat=4)}
    assert ends == {StopReason.DONE, StopReason.MAX_TURNS, StopReason.INVALID}


def test_a_potential_changes_no_optimal_policy_and_changes_may() -> None:
    class Bait(ScoredWalk):
        """Place 6 is scored far above what it is worth, and cannot be reached in two turns by way of place 3."""

        def _score_state(self, state: dict[str, Any]) -> Any:
            return 10.0 if state["place"] == 6 else 0.0

    def best(env_class: type[MultistepEnv], **config: Any) -> set[tuple[str, ...]]:
        env = env_class(env_config={"max_steps_per_episode": 2, **config})
        rewards = {actions: play(env, actions, start=2).final_reward for actions in itertools.product("12", repeat=2)}
        return {actions for actions, reward in rewards.items() if reward == pytest.approx(max(rewards.values()))}

    assert best(Walk) == best(Bait, state_scores="potential") == {("1", "1"), ("1", "2")}
    assert best(Bait, state_scores="change") == {("2", "2")}


def test_an_episode_without_tokens_left_ends_its_potential_at_the_last_turn() -> None:
    config = {"state_scores": "potential", "max_trajectory_tokens": 45}
    played = play(ScoredWalk(chat_tokenizer(), config), ("1", "1", "1", "1"))
    assert played.stop_reason is StopReason.MAX_TOKENS
    assert 0 < len(played.turns) < 4
    assert sum((turn.components or {})["progress"] for turn in played.turns) == pytest.approx(-0.1)


def test_several_scores_are_rewards_of_their_own() -> None:
    class Two(Walk):
        def _score_state(self, state: dict[str, Any]) -> Any:
            return {"place": state["place"]} | ({"far": 1.0} if state["place"] > 2 else {})

    played = play(Two(), ("1", "1", "2"))
    assert played.final_components == {"place": 4.0, "far": 1.0, "reward": 1.0}
    assert played.turns[1].components == {"reward": 1.0, "place": 1.0, "far": 1.0}


def test_each_episode_of_a_trial_is_scored_from_its_start_and_practice_is_not() -> None:
    config = {"episodes_per_trial": 3, "free_shots": 1, "keep_history": True, "max_steps_per_episode": 2}
    played = play(ScoredWalk(env_config=config), ("2", "2"))
    assert [turn.reward for turn in played.turns] == pytest.approx([0, 0, 1.8, 1.6, 1.8, 1.6])
    assert played.final_reward == pytest.approx(2 * 3.4)


def test_an_own_final_reward_receives_the_rewards_with_their_changes() -> None:
    class Last(ScoredWalk):
        def _final_reward(self, state: dict[str, Any], turn_rewards: list[float]) -> float:
            return turn_rewards[-1]

    assert play(Last(), ("2", "2")).final_reward == pytest.approx(1.6)
    assert play(Last(env_config={"state_scores": "potential"}), ("2", "2")).final_reward == pytest.approx(1.6 - 2.5)


def test_scores_may_be_awaited_by_all_sessions_together() -> None:
    waiting = [0, 0]

    class Judged(ScoredWalk):
        async def _score_state(self, state: dict[str, Any]) -> Any:
            waiting[0] += 1
            waiting[1] = max(waiting)
            await asyncio.sleep(0.01)
            waiting[0] -= 1
            return super()._score_state(state)

    played = Judged().rollout([{"seed": 0}] * 6, ScriptedAgent(["1", "1", "2"]))
    assert [one.final_reward for one in played] == pytest.approx([3.4] * 6)
    assert waiting[1] == 6


@pytest.mark.parametrize("score", [float("nan"), "good", {"a": None}, {1: 2.0}])
def test_a_score_that_is_no_number_fails_its_episode_with_a_sentence(score: Any) -> None:
    class Wrong(Walk):
        def _score_state(self, state: dict[str, Any]) -> Any:
            return score if state["place"] == 3 else 0.0

    first, second = Wrong().rollout([{"seed": 0}, {"seed": 0, "start": 4}], ScriptedAgent(["2", "2"]))
    assert "_score_state" in str(first.error)
    assert "must be a" in str(first.error)
    assert len(first.turns) == 1
    assert not second.failed


def test_rewards_by_role_cannot_be_scored() -> None:
    class Seats(ScoredWalk):
        def _role(self, state: dict[str, Any]) -> str:
            return "walker"

        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            state, reward, done, info = super()._step_episode(session_id, state, action)
            return state, 0.0, done, {**info, "rewards": {"walker": reward}}

    assert "_step_episode returns rewards by role" in str(play(Seats(), ("2",)).error)


def test_the_setting_has_two_values_and_the_checks_know_the_hook() -> None:
    with pytest.raises(ConfigError, match=r"env_config\['state_scores'\] must be .*'change'.*'potential'"):
        ScoredWalk(env_config={"state_scores": "both"})
    assert not check_env(ScoredWalk(), [{"seed": 0}], ScriptedAgent(["1", "1", "2"])).findings

    class Changing(Walk):
        def _score_state(self, state: dict[str, Any]) -> Any:
            state["place"] += 0
            state["seen"] = True
            return 0.0

    findings = check_env(Changing(), [{"seed": 0}], ScriptedAgent(["1", "1", "2"])).findings
    assert any("_score_state changes the state" in one.text for one in findings)
