"""A recorded result is complete, and its fingerprint changes with what was measured and with nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentsgym import MultistepEnv, ScriptedAgent
from agentsgym.credit.registry import get_estimator
from benchmarks.record import fingerprint, median, record

ROOT = Path(__file__).parents[2]
ROWS = [{"task_data": {"seed": seed}} for seed in range(40)]
SETTINGS = {"learning_rate": 1e-3, "max_steps": 5}


class Draws(MultistepEnv):
    """Shows a number that the session draws."""

    question = "Say"
    reward, is_done = 1.0, True

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "number": self.rng(session_id).randint(0, 9)}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return f"{self.question} {state['number']}."

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        return state, self.reward * (str(state["number"]) in action), self.is_done, {}

    def reference_player(self, seed: int) -> ScriptedAgent:
        return ScriptedAgent(["0 1 2 3 4 5 6 7 8 9"])


def of(env: Any = None, recipe: Any = None, estimator: str = "return_to_go", rows: Any = None) -> dict[str, str]:
    return fingerprint(env or Draws(), rows or ROWS, recipe or SETTINGS, get_estimator(estimator))


def test_a_result_has_what_a_reader_needs_to_trust_it(tmp_path: Path) -> None:
    behavior = of()
    path = record(tmp_path / "results", "speed", {"ratio": median([1.0, 1.5, 1.2])}, [0, 1], behavior)
    result = json.loads(path.read_text(encoding="utf-8"))
    assert path == tmp_path / "results" / "speed.json"
    assert result.keys() == {"figures", "seeds", "command", "commit", "date", "machine", "fingerprint"}
    assert result["figures"] == {"ratio": {"value": 1.2, "low": 1.0, "high": 1.5}}
    assert (result["seeds"], result["fingerprint"]) == ([0, 1], behavior)
    assert {"cores", "gpu", "python", "torch", "trl", "transformers", "agentsgym"} == result["machine"].keys()
    assert result["command"].startswith("python ")


@pytest.mark.parametrize(
    ("figures", "seeds", "sentence"),
    [
        ({}, [0], "needs a figure and a seed"),
        ({"ratio": median([1.0])}, [], "needs a figure and a seed"),
        ({"ratio": {"value": 3.0, "low": 1.0, "high": 2.0}}, [0], "'ratio' must lie in its interval"),
    ],
)
def test_an_incomplete_result_is_not_written(figures: Any, seeds: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        record(tmp_path, "speed", figures, seeds, None)
    assert [*tmp_path.iterdir()] == []


def test_the_interval_of_a_median_leaves_out_what_95_percent_allow() -> None:
    assert median(range(9)) == {"value": 4, "low": 1, "high": 7}  # 1 - 2 (1 + 9) / 512 = 96 %
    assert median(range(5)) == {"value": 2, "low": 0, "high": 4}
    assert median([2.5]) == {"value": 2.5, "low": 2.5, "high": 2.5}


def changed(name: str, **members: Any) -> Any:
    return type(name, (Draws,), members)()


def test_a_fingerprint_changes_with_prompts_rewards_ends_settings_and_estimator_alone() -> None:
    before = of()
    assert of(changed("Moved", helper=1)) == of(rows=ROWS[:32]) == of(recipe={**SETTINGS}) == before
    for env in (
        changed("Prompt", question="Name"),
        changed("Reward", reward=0.5),
        changed("Ends", default_config={"max_steps_per_episode": 1}, is_done=False),
        Draws(env_config={"system_prompt": "Play."}),
    ):
        after = of(env)
        assert after["play"] != before["play"]
        assert {**after, "play": ""} == {**before, "play": ""}
    assert of(recipe={**SETTINGS, "max_steps": 6}) == {
        **before,
        "recipe": of(recipe={**SETTINGS, "max_steps": 6})["recipe"],
    }
    assert of(recipe={**SETTINGS, "max_steps": 6})["recipe"] != before["recipe"]
    of_each = {name: of(estimator=name) for name in ("reward", "grpo", "rloo", "gigpo", "turn_gae")}
    assert len({one["advantages"] for one in of_each.values()}) == 5
    assert {one["play"] for one in of_each.values()} == {before["play"]}


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    code = "from test_record import of; print(of())"
    folders = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "benchmarks")])
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": folders}
        ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert ran.stdout == f"{of()}\n"
