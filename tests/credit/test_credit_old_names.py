"""Names that have changed work for one version, with a warning that says the new one."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
from scored_batches import rollout

from agentsgym.credit.advantages import Scale, ScoredRollout, get_estimator
from agentsgym.credit.ema import EMABaselines
from agentsgym.credit.gae import bilevel_gae, turn_gae
from agentsgym.errors import ConfigError

LAMBDA = r"^the option 'trace_decay' is now 'gae_lambda'$"
BATCH = [
    ScoredRollout(turn_rewards=[0, 1], final_reward=1, group=0, state_keys=[None] * 2, values=[[0.5, 0.25], [0.5]])
]


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("memory", "MovingBaselines", "agentsgym.credit.ema.EMABaselines"),
        ("advantages", "expand_to_tokens", "agentsgym.credit.rewards.scatter_to_tokens"),
    ],
)
def test_an_old_name_still_works(module: str, old: str, new: str) -> None:
    home, _, name = new.rpartition(".")
    with pytest.warns(DeprecationWarning, match=rf"^agentsgym\.credit\.{module}\.{old} is now {new}$"):
        found = getattr(importlib.import_module(f"agentsgym.credit.{module}"), old)
    assert found is getattr(importlib.import_module(home), name)


@pytest.mark.parametrize("estimator", [turn_gae, bilevel_gae])
def test_trace_decay_is_gae_lambda(estimator: Any) -> None:
    expected = estimator(BATCH, scale="none", gae_lambda=0.5)
    assert expected != estimator(BATCH, scale="none")
    with pytest.warns(DeprecationWarning, match=LAMBDA):
        assert estimator(BATCH, scale="none", trace_decay=0.5) == expected
    with pytest.warns(DeprecationWarning, match=LAMBDA):
        bound = get_estimator(estimator, trace_decay=0.5)
    assert bound.options == {"gae_lambda": 0.5}
    assert bound(BATCH, discount=1.0, scale="none") == expected


def test_token_trace_decay_is_token_gae_lambda() -> None:
    with pytest.warns(DeprecationWarning, match=r"^the option 'token_trace_decay' is now 'token_gae_lambda'$"):
        assert get_estimator("bilevel_gae", token_trace_decay=0.5).options == {"token_gae_lambda": 0.5}


def test_an_option_under_both_names_is_refused() -> None:
    message = r"^'trace_decay' is the old name of 'gae_lambda': give one of them, got both$"
    with pytest.raises(ConfigError, match=message):
        get_estimator("turn_gae", trace_decay=0.5, gae_lambda=0.5)
    with pytest.raises(ConfigError, match=message):
        turn_gae(BATCH, gae_lambda=0.5, trace_decay=0.5)  # pyright: ignore[reportCallIssue]


def remembers(
    rollouts: Sequence[ScoredRollout], *, discount: float, scale: Scale, memory: EMABaselines
) -> list[list[float]]:
    memory.update("calls", 1.0, decay=0.5)
    return [[memory.get("calls")] for _ in rollouts]


def test_an_estimator_of_ones_own_may_still_call_its_state_memory() -> None:
    with pytest.warns(DeprecationWarning, match="'remembers' takes the keyword 'memory', which is now 'state'"):
        keeps = get_estimator(remembers)
    assert [keeps([rollout([1.0])], discount=1.0, scale="none") for _ in range(2)] == [[[0.5]], [[0.75]]]
    assert keeps.state is not None
    assert keeps.state.get("calls") == 0.75
