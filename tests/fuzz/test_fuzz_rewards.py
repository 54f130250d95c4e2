"""Whatever a step of an environment returns, in every estimator and every loss's advantages."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from outcomes import fuzzed, survives
from values import anything, floats, numbers, texts

import agentsgym
from agentsgym import MultistepEnv, ScoredRollout, ScriptedAgent
from agentsgym.credit.registry import ESTIMATORS, get_estimator
from agentsgym.credit.rewards import TOKEN_CREDITS, TURN_CREDITS

_info = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("success", "invalid", "rewards", "truncated", "random_reward", "optimal_reward", "steps", "answer"), anything
    ),
)
_steps = st.tuples(st.one_of(st.just({}), anything), anything | floats, st.booleans() | anything, _info | anything)


class _Game(MultistepEnv):
    steps: ClassVar[list[Any]] = []
    key: ClassVar[Any] = None

    def _initialize_episode(self, session_id: str, task_data: Any) -> Any:
        return {"done": False, "k": 0}

    def _format_prompt(self, state: Any, step: int) -> Any:
        return self.key if self.key is not None and step else "?"

    def _step_episode(self, session_id: str, state: Any, action: str) -> Any:
        answer = self.steps[state["k"] % len(self.steps)]
        if isinstance(answer, tuple) and answer and isinstance(answer[0], dict):
            answer = ({**answer[0], "done": False, "k": state["k"] + 1}, *answer[1:])
        return answer

    def _state_key(self, state: Any) -> Any:
        return self.key

    def _potential(self, state: Any) -> Any:
        return self.key


@fuzzed(500)
@given(
    st.lists(_steps | anything, min_size=1, max_size=3),
    st.none() | anything,
    st.sampled_from([*TURN_CREDITS]),
    st.sampled_from([*TOKEN_CREDITS]),
)
def test_steps(steps: list[Any], key: Any, turn_credit: str, token_credit: str) -> None:
    _Game.steps, _Game.key = steps, key
    env = survives(_Game, None, {"max_steps_per_episode": 3, "turn_credit": turn_credit, "token_credit": token_credit})
    if not isinstance(env, _Game):
        return
    found = survives(env.rollout, [{"seed": 1}, {"seed": 2}], ScriptedAgent(["a"] * 3), 2)
    if not isinstance(found, list):
        return
    survives(agentsgym.evaluate, env, [{"seed": 1}], ScriptedAgent(["a"] * 3), num_rollouts=2, max_failed_fraction=1.0)
    survives(agentsgym.audit, found)
    for trajectory in found:
        survives(trajectory.as_dict)
        survives(trajectory._repr_html_)
        survives(ScoredRollout.from_trajectory, trajectory, group=0)
        assert math.isfinite(trajectory.final_reward)


@st.composite
def batches(draw: st.DrawFn) -> list[ScoredRollout]:
    """Rollouts with large but finite rewards, as training passes them."""
    reward = st.sampled_from([0.0, 1.0, -1.0, 3e38, -3e38, 1e100, -1e100, 1e-320]) | st.floats(-1, 1)
    rollouts: list[ScoredRollout] = []
    for _ in range(draw(st.integers(0, 5))):
        earned = draw(st.lists(reward, max_size=3))
        rollouts.append(
            ScoredRollout(
                turn_rewards=earned,
                final_reward=draw(reward),
                group=draw(st.integers(0, 1)),
                state_keys=[draw(st.sampled_from([None, 1, "a"])) for _ in earned],
                roles=[draw(st.sampled_from(["x", None])) for _ in earned] if draw(st.booleans()) else (),
                potentials=[draw(st.none() | reward) for _ in earned] if draw(st.booleans()) else (),
                token_counts=[draw(st.integers(0, 3)) for _ in earned],
                failed=draw(st.booleans()),
            )
        )
    return rollouts


@fuzzed(500)
@given(st.sampled_from([*ESTIMATORS]), batches(), st.floats(0, 1), st.sampled_from(["none", "group", "batch"]))
def test_estimators(name: str, rollouts: list[ScoredRollout], discount: float, scale: Any) -> None:
    found = survives(get_estimator(name), rollouts, discount=discount, scale=scale)
    if not isinstance(found, Exception):
        for row in found:
            assert all(math.isfinite(one) for one in np.ravel(row)), (name, row)


@fuzzed(500)
@given(
    st.sampled_from([*ESTIMATORS]) | texts | anything,
    st.dictionaries(
        st.sampled_from(["baseline", "potential_weight", "step_weight", "alpha", "decay", "lam", "lambda_", "state"])
        | texts,
        anything,
        max_size=2,
    ),
)
def test_options_of_estimators(name: Any, options: dict[str, Any]) -> None:
    survives(get_estimator, name, **options)


_fields = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        (
            "turn_rewards",
            "final_reward",
            "group",
            "state_keys",
            "roles",
            "potentials",
            "token_counts",
            "values",
            "invalid",
            "final_rewards",
            "failed",
            "dropped",
        ),
        anything,
    ),
)


@fuzzed(500)
@given(
    _fields, st.sampled_from([*ESTIMATORS]), st.sampled_from(["none", "group", "batch"]) | anything, numbers | anything
)
def test_scored_rollouts(fields: dict[str, Any], name: str, scale: Any, discount: Any) -> None:
    sound = {"turn_rewards": [1.0, 0.0], "final_reward": 1.0, "group": 0, "state_keys": [None, None]}
    row = survives(ScoredRollout, **sound | fields)
    if isinstance(row, ScoredRollout):
        survives(get_estimator(name), [row, row], discount=discount, scale=scale)
