"""Judges of an environment: where their scores go, when they are called, and what happens if they fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from judged_games import Greeting, ScriptedJudge, WaitingJudge, conversation, data_of, longest_first

from agentsgym import (
    Agent,
    AsyncAgent,
    ConfigError,
    Criterion,
    EnvProcessPool,
    EnvThreadPool,
    FailurePolicy,
    Judge,
    JudgeError,
    RolloutStore,
    ScriptedAgent,
    TooManyFailuresError,
    audit,
    check_env,
    evaluate,
    evaluate_mixed,
    register,
)
from agentsgym.evaluation.replay import replay_all
from agentsgym.judging.scores import with_scores
from agentsgym.types import Action, TurnRequest

TASKS = [{"seed": 0}, {"seed": 1}]
MANNERS = [Criterion("polite", "Polite?", weight=0.5), Criterion("clear", "Clear?", scale=(0, 10))]


def manners(_: str) -> dict[str, Any]:
    return {"reason": "Short.", "polite": True, "clear": 4}


def judged(*judges: Judge, env_config: dict[str, Any] | None = None, kind: type[Greeting] = Greeting) -> Greeting:
    env = kind(env_config=env_config)
    env.judges = judges
    return env


class Longer(Agent):
    """Answers "hello" a few times, more often in every conversation."""

    def __init__(self) -> None:
        self.number = 0

    def get_action(self, messages: list[Any], agent_state: Any) -> tuple[str, Any]:
        if agent_state is None:
            self.number += 1
            agent_state = self.number
        return "hello " * agent_state, agent_state


def test_an_episode_scores_in_the_final_reward_and_the_last_turn() -> None:
    env = judged(Judge(ScriptedJudge(manners), rubric=MANNERS))
    [one] = env.rollout(TASKS[:1], ScriptedAgent(["hello", "hm"]))
    assert one.final_components == {"reward": 1.0, "polite": 0.5, "clear": 0.4}
    assert one.final_reward == pytest.approx(1.9)
    assert [turn.components for turn in one.turns] == [None, {"polite": 0.5, "clear": 0.4}]
    assert one.turn_rewards == pytest.approx([1.0, 0.9])


def test_a_turn_scores_in_its_own_reward() -> None:
    agent = ScriptedJudge(lambda prompt: {"warm": "hello" in data_of(prompt)[-1]})
    env = judged(Judge(agent, rubric=[Criterion("warm", "Warm?", weight=-2)], scope="turn"))
    [one] = env.rollout(TASKS[:1], ScriptedAgent(["hm", "hello"]))
    assert [turn.components for turn in one.turns] == [{"warm": 0.0}, {"reward": 1.0, "warm": -2.0}]
    assert (one.final_components, one.final_reward) == ({"reward": 1.0, "warm": -2.0}, -1.0)


def test_a_group_is_ranked_at_once() -> None:
    agent = ScriptedJudge(longest_first)
    env = judged(Judge(agent, rubric={"best": "Which?"}, scope="group"))
    played = env.rollout(TASKS, Longer(), num_rollouts=3)
    assert [one.final_components["best"] for one in played if one.final_components] == [0, 0.5, 1, 0, 0.5, 1]
    assert len(agent.prompts) == 2
    assert agent.num_finished == 1


def test_per_token_rewards_follow_the_scores() -> None:
    from agentsgym import tiny_policy  # noqa: PLC0415  # imports torch

    plain = Greeting()
    _, tokenizer = tiny_policy(plain, tasks=TASKS, agent=ScriptedAgent(["hello", "hello"]), hidden_size=16)
    env = Greeting(tokenizer)
    env.judges = [Judge(ScriptedJudge(manners), rubric=MANNERS)]
    [one] = env.rollout(TASKS[:1], ScriptedAgent(["hello", "hello"]))
    assert [sum(one.per_token_rewards[turn.start : turn.stop]) for turn in one.turns] == pytest.approx([1.0, 1.9])
    assert audit([one]).ok


@pytest.mark.parametrize("pool", [None, EnvThreadPool(2), EnvProcessPool(2)], ids=["none", "threads", "processes"])
def test_judges_are_called_wherever_the_environment_runs(pool: Any) -> None:
    env = judged(Judge(ScriptedJudge(manners), rubric=MANNERS))
    try:
        played = env.rollout(TASKS, ScriptedAgent(["hello", "hm"]), num_rollouts=2, pool=pool)
    finally:
        if pool is not None:
            pool.close()
    assert [one.final_reward for one in played] == pytest.approx([1.9] * 4)


def test_words_and_cost_are_kept_with_the_rollout(tmp_path: Path) -> None:
    env = judged(
        Judge(ScriptedJudge(manners), rubric=MANNERS, name="manners"),
        Judge(ScriptedJudge(lambda _: {"warm": True}), rubric={"warm": "?"}, scope="turn", name="warmth"),
    )
    found = evaluate(env, ScriptedAgent(["hello", "hm"]), TASKS, store=tmp_path)
    [one, _] = found.trajectories
    first, *others = one.info["judgments"]
    assert (first["judge"], first["scope"], first["turn"], first["reason"]) == ("manners", "episode", None, "Short.")
    assert first["answers"] == ['{"reason": "Short.", "polite": true, "clear": 4}']
    assert [(other["judge"], other["turn"]) for other in others] == [("warmth", 0), ("warmth", 1)]
    assert one.info["length"] == 2  # what the environment answered
    assert one.metrics["judge_calls"] == 3
    assert found.metrics["judge_calls"].mean == 3
    assert found.metrics["judge_repeats"].mean == 0
    assert "judge_tokens" not in one.metrics
    [stored] = [each for each in RolloutStore(tmp_path) if each.task_index == 0]
    assert stored.info["judgments"] == one.info["judgments"]
    assert found.components["warm"].mean == 2.0


def test_without_judges_nothing_changes() -> None:
    plain, empty = Greeting(), judged()
    for one, other in zip(plain.rollout(TASKS, Longer()), empty.rollout(TASKS, Longer()), strict=True):
        assert {**one.as_dict(), "session_id": ""} == {**other.as_dict(), "session_id": ""}
        assert "judgments" not in one.info


class Polite(Greeting):
    """An environment whose class has a judge."""

    judges: ClassVar[Any] = Judge(ScriptedJudge(manners), rubric=MANNERS)


def test_judges_of_a_class_apply_to_its_instances() -> None:
    register(Polite)
    row = {"env_class_path": f"{__name__}.Polite", "env_config": {}, "task_data": {"seed": 0}}
    found = evaluate_mixed(ScriptedAgent(["hello", "hm"]), [row])
    assert found.components["clear"].mean == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("judges", "complaint"),
    [
        ("judge", r"Greeting.judges must be a list of agentsgym.Judge, got 'judge'"),
        ([ScriptedAgent(["x"])], r"Greeting.judges must be a list of agentsgym.Judge, got \[<"),
        (
            [Judge(ScriptedJudge(manners), rubric=MANNERS, name=name) for name in "ab"],
            "must have different names, but judges 'a' and 'b' both have 'polite'",
        ),
        (
            Judge(ScriptedJudge(longest_first), rubric={"best": "?"}, scope="group"),
            "compares the rollouts of a task.* must be at least 2, got 1",
        ),
    ],
)
def test_bad_judges_are_refused_before_anything_is_played(judges: Any, complaint: str) -> None:
    env, agent = Greeting(), Longer()
    env.judges = judges
    with pytest.raises(ConfigError, match=complaint):
        env.rollout(TASKS, agent)
    assert agent.number == 0


def test_the_agent_that_plays_cannot_judge() -> None:
    agent = ScriptedJudge(manners)
    with pytest.raises(ConfigError, match="judge 'judge' has the agent that plays, a ScriptedJudge"):
        judged(Judge(agent, rubric=MANNERS)).rollout(TASKS, agent)


def test_the_model_that_plays_cannot_judge() -> None:
    from agentsgym import PolicyAgent, tiny_policy  # noqa: PLC0415  # imports torch

    model, tokenizer = tiny_policy(Greeting(), tasks=TASKS, agent=ScriptedAgent(["hello", "hello"]), hidden_size=16)
    env = Greeting(tokenizer)
    env.judges = [Judge(PolicyAgent(model, tokenizer), rubric=MANNERS)]
    with pytest.raises(ConfigError, match="has the model of the agent that plays, a PolicyAgent"):
        env.rollout(TASKS, PolicyAgent(model, tokenizer))


def test_an_environment_with_judges_passes_the_checks() -> None:
    assert not check_env(Polite, TASKS).findings


def test_a_criterion_named_as_a_reward_of_the_environment_ends_the_run() -> None:
    class Named(Greeting):
        def _step_episode(self, session_id: str, state: Any, action: str) -> Any:
            return state, {"polite": 1.0}, False, {}

    env = judged(Judge(ScriptedJudge(manners), rubric=MANNERS), kind=Named)
    with pytest.raises(ConfigError, match="'polite' has the same name as a reward of the environment"):
        env.rollout(TASKS, ScriptedAgent(["a", "b"]))


def broken_for(word: str) -> ScriptedJudge:
    return ScriptedJudge(lambda prompt: "?" if any(word in line for line in data_of(prompt)) else manners(prompt))


def test_a_failed_judgment_fails_its_rollout_only() -> None:
    env = judged(Judge(broken_for("hello hello hello"), rubric=MANNERS))
    *played, failed = env.rollout(TASKS[:1], Longer(), num_rollouts=3)
    assert not any(one.failed for one in played)
    assert failed.failed
    assert (failed.final_reward, failed.final_components, len(failed.turns)) == (0.0, None, 2)
    assert str(failed.error).splitlines()[:2] == [
        "task 0, rollout 2, after its last turn",
        "JudgeError: judge 'judge' (ScriptedJudge) gave two answers that cannot be read: of the second, it is not one "
        "valid JSON object and nothing else: '?'",
    ]


def test_failures_of_judges_count_and_may_be_retried() -> None:
    env = judged(Judge(broken_for("hello hello hello"), rubric=MANNERS))
    with pytest.raises(TooManyFailuresError, match="judge 'judge'"):
        env.rollout(TASKS[:1], Longer(), num_rollouts=3, failures=FailurePolicy.fail_fast())
    answers = iter(["?", "?"])
    env = judged(Judge(ScriptedJudge(lambda prompt: next(answers, None) or manners(prompt)), rubric=MANNERS))
    seen: list[Any] = []
    [one] = env.rollout(TASKS[:1], Longer(), failures=FailurePolicy.retry(1), on_finish=seen.append)
    assert (one.failed, one.num_retries) == (False, 1)
    assert seen == [one]


def test_a_failure_with_a_number_is_marked() -> None:
    env = judged(Judge(ScriptedJudge(lambda _: "?"), rubric=MANNERS, on_judge_failure=0.5))
    [one] = env.rollout(TASKS[:1], ScriptedAgent(["hello", "hm"]))
    assert one.final_components == {"reward": 1.0, "polite": 0.25, "clear": 0.5}
    assert one.metrics["judge_failures"] == 1
    assert "cannot be read" in one.info["judgments"][0]["error"]


def test_a_ranking_waits_for_retried_rollouts_and_leaves_out_failed_ones() -> None:
    class Fragile(Greeting):
        faults: ClassVar[list[int]] = []

        def _step_episode(self, session_id: str, state: Any, action: str) -> Any:
            if len(action.split()) == 2 or (len(action.split()) == 4 and len(self.faults) < 9):
                self.faults.append(len(action))
                raise OSError("the bell is broken")
            return super()._step_episode(session_id, state, action)

    Fragile.faults.clear()
    agent = ScriptedJudge(longest_first)
    env = judged(Judge(agent, rubric={"best": "Which?"}, scope="group"), kind=Fragile)
    seen: list[Any] = []
    played = env.rollout(TASKS[:1], Longer(), num_rollouts=3, failures=FailurePolicy.retry(1), on_finish=seen.append)
    assert [one.num_retries for one in played] == [0, 1, 0]  # the second is played again, as the fourth conversation
    assert [one.failed for one in played] == [False, True, False]
    assert [one.final_components["best"] for one in played if one.final_components] == [0.0, 1.0]
    assert sorted(one.rollout_index for one in seen) == [0, 1, 2]
    assert len(agent.prompts) == 1


def test_a_retried_rollout_that_waits_for_its_group_is_not_played_again() -> None:
    class Scripted(Agent):
        """Answers what its conversation holds: the second and third fail, then the fourth and the fifth, and so on."""

        number = 0

        def get_action(self, messages: list[Any], agent_state: Any) -> tuple[str, Any]:
            if agent_state is None:
                self.number += 1
                agent_state = ["fine", "bad", "bad", "good", "bad", "better"][self.number - 1]
            return agent_state, agent_state

    class Strict(Greeting):
        def _step_episode(self, session_id: str, state: Any, action: str) -> Any:
            if action == "bad":
                raise ValueError("bad")
            return super()._step_episode(session_id, state, action)

    agent, seen = Scripted(), list[Any]()
    env = judged(Judge(ScriptedJudge(longest_first), rubric={"best": "Which?"}, scope="group"), kind=Strict)
    played = env.rollout(TASKS[:1], agent, num_rollouts=3, failures=FailurePolicy.retry(3), on_finish=seen.append)
    assert agent.number == 6
    assert [one.num_retries for one in played] == [0, 1, 2]
    assert sorted(one.rollout_index for one in seen) == [0, 1, 2]
    assert sorted((one.final_components or {})["best"] for one in played) == [0.0, 0.5, 1.0]


def test_a_failed_ranking_fails_the_group() -> None:
    env = judged(Judge(ScriptedJudge(lambda _: {"best": [1]}), rubric={"best": "Which?"}, scope="group"))
    played = env.rollout(TASKS[:1], Longer(), num_rollouts=2, failures=FailurePolicy.retry(1))
    assert [one.failed for one in played] == [True, True]
    assert [one.num_retries for one in played] == [0, 0]  # a ranking is not a reason to play again


def test_judges_work_while_others_still_play() -> None:
    times: dict[str, float] = {}

    def note(prompt: str) -> dict[str, Any]:
        times.setdefault("judged", time.monotonic())
        return manners(prompt)

    class Slow(AsyncAgent):
        async def aact(self, request: TurnRequest) -> Action:
            import asyncio  # noqa: PLC0415

            is_slow = request.agent_state or len(times) > 0
            await asyncio.sleep(0.3 if is_slow else 0.0)
            times["played"] = time.monotonic()
            return Action(text="hello", agent_state=request.agent_state)

    env = judged(Judge(WaitingJudge(note), rubric=MANNERS))
    env.rollout([{"seed": n} for n in range(4)], Slow(), max_concurrent=1)
    assert times["judged"] < times["played"]


def test_callbacks_run_on_the_thread_that_plays() -> None:
    threads: set[Any] = set()
    env = judged(Judge(WaitingJudge(manners, 0.01), rubric=MANNERS))
    env.rollout(TASKS, Longer(), num_rollouts=4, on_finish=lambda _: threads.add(threading.current_thread()))
    assert threads == {threading.current_thread()}


def test_an_interruption_stops_the_judges() -> None:
    agent = WaitingJudge(manners, 30)

    class Interrupted(Greeting):
        def _close_episode(self, session_id: str, state: Any) -> None:
            if state["task"]["seed"] == 1:
                raise KeyboardInterrupt

    env = judged(Judge(agent, rubric=MANNERS), kind=Interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        env.rollout(TASKS, Longer(), max_concurrent=1)
    assert time.monotonic() - began < 10


def test_practice_is_not_judged() -> None:
    agent = ScriptedJudge(lambda _: {"warm": True})
    config = {"episodes_per_trial": 2, "free_shots": 1, "keep_history": True}
    env = judged(Judge(agent, rubric={"warm": "?"}, scope="turn"), env_config=config)
    [one] = env.rollout(TASKS[:1], ScriptedAgent(["hello"], repeat_last=True))
    assert [turn.components for turn in one.turns] == [None, None, *[{"reward": 1.0, "warm": 1.0}] * 2]


class Seats(Greeting):
    """Two roles in turn; the second is rewarded."""

    def _role(self, state: Any) -> str:
        return "AB"[state.get("turn", 0) % 2]

    def _step_episode(self, session_id: str, state: Any, action: str) -> Any:
        turn = state.get("turn", 0)
        return {**state, "turn": turn + 1}, 0.0, False, {"rewards": {"A": 0.0, "B": 0.5}}


def test_the_score_of_a_turn_is_its_roles() -> None:
    agent = ScriptedJudge(lambda prompt: {"warm": "hello" in data_of(prompt)[-1]})
    env = judged(Judge(agent, rubric={"warm": "?"}, scope="turn"), kind=Seats)
    [one] = env.rollout(TASKS[:1], ScriptedAgent(["hm", "hello"]))
    assert one.final_rewards == {"A": 0.0, "B": 2.0}
    assert one.role_components["B"] == {"reward": 1.0, "warm": 1.0}
    assert (one.final_reward, one.final_components) == (0.0, {"warm": 0.0})
    assert audit([one]).ok
    env = judged(Judge(ScriptedJudge(manners), rubric=MANNERS), kind=Seats)
    with pytest.raises(ConfigError, match="rewards are given by role"):
        env.rollout(TASKS[:1], ScriptedAgent(["hm", "hello"]))


def test_scores_of_a_rollout_without_turns_are_in_the_final_reward() -> None:
    assert with_scores(conversation("A guest."), [(None, {"warm": 1.0})]).final_components == {"warm": 1.0}


def test_one_episode_by_itself_is_judged() -> None:
    env = judged(Judge(ScriptedJudge(manners), rubric=MANNERS))
    env.active_states["s"] = env._initialize_episode("s", {})
    assert env._run_complete_episode("s", ScriptedAgent(["hello", "hm"]))["final_reward"] == pytest.approx(1.9)
    env = judged(Judge(ScriptedJudge(lambda _: "?"), rubric=MANNERS))
    env.active_states["s"] = env._initialize_episode("s", {})
    with pytest.raises(JudgeError, match="gave two answers"):
        env._run_complete_episode("s", ScriptedAgent(["hello", "hm"]))


def test_a_recorded_rollout_is_replayed_with_its_scores(tmp_path: Path) -> None:
    env = judged(Judge(ScriptedJudge(manners), rubric=MANNERS))
    evaluate(env, ScriptedAgent(["hello", "hm"]), TASKS, store=tmp_path)
    replays = [*replay_all(RolloutStore(tmp_path).records(), Greeting())]
    assert [one.outcome for one in replays] == ["same", "same"]


def test_a_resumed_evaluation_ranks_whole_groups_and_knows_its_judges(tmp_path: Path) -> None:
    agent = ScriptedJudge(longest_first)

    def play(rubric: dict[str, str], num_rollouts: int) -> Sequence[Any]:
        env = judged(Judge(agent, rubric=rubric, scope="group"))
        options: dict[str, Any] = {"store": tmp_path, "agent_name": "longer", "resume": True}
        return evaluate(env, Longer(), TASKS, num_rollouts, **options).trajectories

    play({"best": "Which?"}, 2)
    assert len(agent.prompts) == 2
    play({"best": "Which?"}, 2)
    assert len(agent.prompts) == 2  # all known
    play({"best": "Which?"}, 3)
    assert len(agent.prompts) == 4  # with a third member, each group is ranked again
    play({"best": "Which is best?"}, 3)
    assert len(agent.prompts) == 6
