"""Forks begin with the turns that are kept, bit for bit, and continue with the agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import (
    Action,
    Agent,
    AsyncAgent,
    MultistepEnv,
    PolicyAgent,
    RandomAgent,
    RolloutStore,
    ScriptedAgent,
    TurnRequest,
    tiny_policy,
)
from agentsgym.envs.AgentProgram import AgentProgramEnv
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.errors import ConfigError, EnvError, TaskError
from agentsgym.evaluation.compare import compare
from agentsgym.types import StopReason, Trajectory
from agentsgym.viewer.answers import Answers

CONFIG = {"objects": ["clock", "chair", "apple", "banana", "horse", "piano"], "max_steps_per_episode": 6}
MODEL, TOKENIZER = tiny_policy(TwentyQuestionsEnv(None, CONFIG))
ENV = TwentyQuestionsEnv(TOKENIZER, CONFIG)
[BASE] = ENV.rollout([{"solution": "apple", "seed": 3}], PolicyAgent(MODEL, TOKENIZER, max_turn_tokens=6))


def policy(seed: int = 1) -> PolicyAgent:
    return PolicyAgent(MODEL, TOKENIZER, max_turn_tokens=6, seed=seed)


@given(st.integers(0, len(BASE.turns)), st.integers(0, 2**20))
def test_the_turns_before_a_fork_are_those_of_the_rollout(turn: int, seed: int) -> None:
    forks = ENV.fork(BASE, turn, policy(seed), num_forks=3)
    stop = BASE.turns[turn - 1].stop if turn else BASE.turns[0].start
    for one in forks:
        assert not one.failed
        assert one.token_ids[:stop] == BASE.token_ids[:stop]
        assert one.turns[:turn] == BASE.turns[:turn]
        assert BASE.logprobs is not None
        assert one.logprobs is not None
        assert one.logprobs[:stop] == BASE.logprobs[:stop]


@pytest.mark.parametrize("last", ["a word", "an end", "another special token"])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_truncated_turns_are_repeated_with_what_was_added_behind_them(last: str, reason: Any) -> None:
    end, unknown = TOKENIZER.eos_token_id, TOKENIZER.unk_token_id
    ids = [*TOKENIZER.encode("Is it", add_special_tokens=False), *{"an end": [end], "a word": []}.get(last, [unknown])]
    assert unknown in TOKENIZER.all_special_ids
    action = Action(text="Is it", token_ids=ids, finish_reason=reason)
    [played] = ENV.rollout([{"solution": "apple", "seed": 3}], _Saying(action))
    [fork] = ENV.fork(played, len(played.turns), policy(), num_forks=1)
    assert fork.token_ids == played.token_ids


class _Saying(Agent):
    def __init__(self, action: Action) -> None:
        self.action = action

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        return [self.action] * len(requests)


def test_forks_differ_after_it() -> None:
    forks = ENV.fork(BASE, 1, policy(), num_forks=8)
    assert len({tuple(one.token_ids) for one in forks}) > 1


def test_a_fork_after_the_last_turn_is_the_rollout() -> None:
    [one] = ENV.fork(BASE, len(BASE.turns), policy())
    assert (one.token_ids, one.final_reward, one.stop_reason) == (BASE.token_ids, BASE.final_reward, BASE.stop_reason)


class Dice(MultistepEnv):
    """Rewards a guess of the next draw."""

    default_config = {"max_steps_per_episode": 4}  # noqa: RUF012
    shared = iter(range(10_000))

    def __init__(self, *, is_fair: bool = True) -> None:
        super().__init__()
        self.is_fair = is_fair

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "last": 0}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return f"The last draw was {state['last']}."

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        draw = self.rng(session_id).randint(1, 6) if self.is_fair else next(self.shared)
        return {**state, "last": draw}, float(action == str(draw)), False, {}


GUESSES = RandomAgent([str(n) for n in range(1, 7)], seed=1)


def play(env: MultistepEnv, **task: Any) -> Trajectory:
    [played] = env.rollout([{"seed": 5, **task}], GUESSES)
    return played


def test_the_environment_goes_on_drawing_what_it_drew_without_a_tokenizer_too() -> None:
    env = Dice()
    base = play(env)
    for one in env.fork(base, 2, RandomAgent(["7"], seed=3), num_forks=2):
        assert [turn.reward for turn in one.turns[:2]] == [turn.reward for turn in base.turns[:2]]
        assert [message["content"] for message in one.messages[::2]] == [m["content"] for m in base.messages[::2]]
        assert [message["content"] for message in one.messages[5::2]] == ["7", "7"]


def test_an_agent_keeps_its_own_state_and_asynchronous_agents_play_as_well() -> None:
    class Counting(Agent):
        def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
            return str(agent_state or 0), (agent_state or 0) + 1

    class Waiting(AsyncAgent):
        async def aact(self, request: TurnRequest) -> Action:
            return Action(text=str(request.agent_state or 0), agent_state=(request.agent_state or 0) + 1)

    env = Dice()
    base = play(env)
    for agent in (Counting(), Waiting()):
        [one] = env.fork(base, 1, agent)
        assert [message["content"] for message in one.messages[3::2]] == ["0", "1", "2"]


def test_an_environment_that_draws_from_elsewhere_cannot_be_forked() -> None:
    env = Dice(is_fair=False)
    with pytest.raises(EnvError, match=r"Dice does not replay.*the prompt of turn 1 differs.*self\.rng\(session_id\)"):
        env.fork(play(env), 3, GUESSES)


def test_an_agent_that_fails_fails_its_fork_alone() -> None:
    env = Dice()
    base = play(env)
    [one] = env.fork(base, 2, ScriptedAgent(["1"]))
    assert one.stop_reason is StopReason.FAILED
    assert one.turns[:2] == base.turns[:2]


@pytest.mark.parametrize("turn", [-1, 5, 1.0, True, "1"])
def test_a_turn_that_the_rollout_lacks_is_refused(turn: Any) -> None:
    env = Dice()
    with pytest.raises(ConfigError, match="turn must be an int from 0 to 4"):
        env.fork(play(env), turn, GUESSES)


def test_a_rollout_needs_its_seed_and_a_trial_its_history() -> None:
    env = Dice()
    base = play(env)
    without = Trajectory(
        token_ids=[], turns=base.turns, messages=base.messages, final_reward=0.0, stop_reason=StopReason.DONE
    )
    with pytest.raises(TaskError, match="does not contain its task with its seed"):
        env.fork(without, 1, GUESSES)
    twice = TwentyQuestionsEnv(None, {**CONFIG, "episodes_per_trial": 2})
    [played] = twice.rollout([{"solution": "apple", "seed": 3}], ScriptedAgent(["Is it alive?"], repeat_last=True))
    with pytest.raises(ConfigError, match="requires env_config\\['keep_history'\\] = True"):
        twice.fork(played, 1, GUESSES)


def test_calls_of_programs_cannot_be_forked() -> None:
    env = AgentProgramEnv(TOKENIZER, program=lambda task, endpoint: 0.0)
    with pytest.raises(ConfigError, match="AgentProgramEnv cannot be forked, since the calls of a program cannot be"):
        env.fork(BASE, 1, GUESSES)


def test_stores_with_forks_are_read_filtered_compared_and_shown(tmp_path: Path) -> None:
    forks = ENV.fork(BASE, 2, policy(), num_forks=3)
    credit = {"advantage_estimator": "tree", "options": {"weights": "shared"}, "discount": 1.0, "scale_rewards": "none"}
    with RolloutStore.writer(tmp_path / "store", group=0, generation=1, extra={"credit": credit}) as writer:
        for index, one in enumerate([BASE, *forks]):
            writer.add(replace(one, rollout_index=index))
    store = RolloutStore(tmp_path / "store")
    assert [one.info.get("fork") for one in store] == [None, *[{"rollout": 0, "turn": 2}] * 3]
    forked = store.filter(rollout_index=bool)
    assert [one.token_ids for one in forked] == [one.token_ids for one in forks]
    comparison = compare(store.filter(rollout_index=0), forked)
    assert [(one.num_a, one.num_b) for one in comparison.tasks] == [(1, 3)]
    answers = Answers(store, limit=10, mode="served")
    assert "fork" in answers.rollout(2)["info"]
    assert answers.group(0)["settings"] == "tree · weights shared · discount 1 · scale none · turn credit step"


def test_values_of_states_are_means_over_forks() -> None:
    """The Monte-Carlo value of a state (VinePPO, 2410.01679), with one optimal continuation."""

    class Right(Agent):
        def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
            return [Action(text=self.draws[sum(m["role"] == "user" for m in one.messages) - 1]) for one in requests]

        draws: tuple[str, ...] = ()

    env, agent = Dice(), Right()
    base = play(env)
    agent.draws = (*(message["content"].split()[-1].rstrip(".") for message in base.messages[2::2]), "0")
    for turn in range(4):
        values = [sum(one.reward for one in fork.turns[turn:]) for fork in env.fork(base, turn, agent, num_forks=2)]
        assert values == [3.0 - turn] * 2
