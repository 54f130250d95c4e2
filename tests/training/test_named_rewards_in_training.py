"""Named rewards in a training run: weights, the two ways to combine them, and the metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from games import GuessNumber, settings, tasks, trainer_of

from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.errors import ConfigError
from agentsgym.store.reader import RolloutStore
from agentsgym.testing import chat_tokenizer


class Named(GuessNumber):
    """Names its rewards: for the number, and for every try."""

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        state, reward, done, info = super()._step_episode(session_id, state, action)
        return state, {"won": reward, "tries": -0.125}, done, info


class Summed(GuessNumber):
    """Gives the same rewards as one number."""

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        state, reward, done, info = super()._step_episode(session_id, state, action)
        return state, reward * 2 - 0.125 * 4, done, info


def advantages_of(folder: Path, env_class: Any, **changes: Any) -> tuple[list[list[float]], list[dict[str, Any]]]:
    with trainer_of(folder, env_class=env_class, store_rollouts=str(folder / "store"), **changes) as trainer:
        trainer.train()
    records = [*RolloutStore(folder / "store").records()]
    return [list(record.advantages or ()) for record in records], trainer.state.log_history


def test_weights_are_those_of_the_sum(tmp_path: Path) -> None:
    weights = {"won": 2.0, "tries": 4.0}
    named, logs = advantages_of(tmp_path / "named", Named, reward_weights=weights)
    summed, _ = advantages_of(tmp_path / "summed", Summed)
    assert named == summed
    assert any(any(row) for row in named)
    first = logs[0]
    assert first["rewards/won/mean"] + first["rewards/tries/mean"] == pytest.approx(first["reward"])
    assert first["rewards/tries/mean"] == pytest.approx(-0.125 * first["turns/mean"])
    assert first["rewards/won/std"] > 0


def test_components_may_be_scaled_apart(tmp_path: Path) -> None:
    aggregation = {"multi_objective_aggregation": "normalize_then_sum"}
    separate, _ = advantages_of(tmp_path / "separate", Named, **aggregation)
    together, _ = advantages_of(tmp_path / "together", Named)
    assert any(any(row) for row in separate)
    assert separate != together
    [credit] = {repr(record.extra["credit"]) for record in RolloutStore(tmp_path / "separate" / "store").records()}
    assert "normalize_then_sum" in credit


def test_a_misspelled_weight_ends_the_run_with_its_name(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, env_class=Named, reward_weights={"wn": 1.0})
    with pytest.raises(ConfigError, match=r"reward_weights has a weight for 'wn'.*'won', 'tries'; did you mean 'won'"):
        trainer.train()


def test_weights_may_come_from_a_command_line(tmp_path: Path) -> None:
    assert settings(tmp_path, reward_weights='{"won": 1, "tries": "1e-1"}').reward_weights == {"won": 1, "tries": 0.1}
    assert settings(tmp_path).reward_weights is None


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ([1.0], "reward_weights must be a dict, or a JSON object from a command line"),
        ({"a": "much"}, r"reward_weights\['a'\] must be a finite number, got 'much'"),
        ({"a": float("nan")}, r"reward_weights\['a'\] must be a finite number, got nan"),
        ({1: 1.0}, "must have strings as keys"),
    ],
)
def test_weights_that_are_none_are_refused(weights: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        settings(tmp_path, reward_weights=weights)


def test_rows_of_trl_have_the_components() -> None:
    [rollout] = Named(chat_tokenizer()).rollout([tasks(1)[0]["task_data"]], ScriptedAgent(["one"] * 9))
    entry = rollout.to_rollout()
    assert [*entry["step_components"][0]] == ["won", "tries"]
    assert sum(entry["final_components"].values()) == pytest.approx(entry["final_reward"])
