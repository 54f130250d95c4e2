"""The estimators that docs/credit.md shows run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from scored_batches import rollout

from agentsgym.credit.registry import EstimatorTraits, get_estimator

PAGE = (Path(__file__).parents[2] / "docs" / "credit.md").read_text()


def shown(name: str) -> Any:
    """The function of that name, from the code block that defines it."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if f"def {name}(" in block]
    names: dict[str, Any] = {}
    exec(block, names)
    return names[name]


def test_the_estimator_with_a_state_keeps_an_average_of_each_environment() -> None:
    estimator = get_estimator(shown("slow"), decay=0.5)
    batch = [rollout([0.0, 1.0], environment="chess"), rollout([3.0], environment="chess"), rollout([9.0], failed=True)]
    found = [estimator(batch, discount=1.0, scale="none")[:2] for _ in range(2)]
    assert found == [[[1.0, 1.0], [3.0]], [[0.0, 0.0], [2.0]]]
    assert estimator.traits is None


@pytest.mark.parametrize("discount", [0.5, 1.0])
def test_the_estimator_that_declares_its_traits_is_as_declared(discount: float) -> None:
    estimator = get_estimator(shown("minus_the_best"))
    assert estimator.traits == EstimatorTraits(uses=frozenset({"final_reward"}), compares_in_task_groups=True)
    batch = [rollout([0.0, 1.0]), rollout([3.0]), rollout([9.0], group=1), rollout([7.0], failed=True, group=2)]
    assert estimator(batch, discount=discount, scale="none") == [[-2.0, -2.0], [0.0], [0.0], [0.0]]


def test_the_game_of_two_seats_rewards_as_the_page_states(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if "class LastStone" in block]
    exec(block, {"__name__": "page"})
    printed = capsys.readouterr().out.strip()
    assert printed == "[0.0, -1.0, 1.0] {'X': 1.0, 'O': -1.0}"
    assert f"It prints `{printed}`" in PAGE


def test_the_tree_of_calls_has_the_returns_that_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if 'follow in ("turns", "calls")' in block]
    exec(block, {})
    assert f"```text\n{capsys.readouterr().out}```" in PAGE
