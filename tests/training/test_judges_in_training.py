"""Judges and named rewards in a training run: their scores before credit, weights, metrics, undivided groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from games import GuessNumber, policy, settings, tasks, trainer_of
from judged import CountingAlone, Judged, Ranked

from agentsgym import Judge
from agentsgym.agents.policy.agent import CopiedPolicyAgent
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.errors import ConfigError, TooManyFailuresError
from agentsgym.store.reader import RolloutStore
from agentsgym.testing import chat_tokenizer
from agentsgym.training.generation.generator import _check_complete_groups
from agentsgym.training.trainer import GRPOEnvTrainer


class Unjudged(GuessNumber):
    """Has a judge without answers."""

    judges = Judge(CountingAlone(), rubric={"twos": "How often?"})


@pytest.mark.parametrize("env_class", [Judged, Ranked])
def test_scores_are_there_before_credit(tmp_path: Path, env_class: Any) -> None:
    with trainer_of(tmp_path, env_class=env_class, store_rollouts=str(tmp_path / "store")) as trainer:
        trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["info/judge_calls"] == pytest.approx(1.0 if env_class is Judged else 0.25)
    assert logs["info/judge_failures"] == 0
    assert logs["rewards/ones/mean"] > 0
    assert logs["rewards/ones/mean"] + logs["rewards/reward/mean"] == pytest.approx(logs["reward"])
    records = [*RolloutStore(tmp_path / "store").records()]
    assert any(any(record.advantages or ()) for record in records)
    for record in records:
        [judgment] = record.trajectory.info["judgments"]
        assert (record.trajectory.final_components or {})["ones"] == judgment["scores"]["ones"]
        assert record.trajectory.turns[-1].components is not None


def test_a_weight_of_0_only_records(tmp_path: Path) -> None:
    def weights_after(folder: str, env_class: Any, **changes: Any) -> list[Any]:
        with trainer_of(tmp_path / folder, env_class=env_class, **changes) as trainer:
            trainer.train()
        return [one.detach().clone() for one in trainer.model.parameters()]

    plain = weights_after("plain", GuessNumber)
    recorded = weights_after("recorded", Judged, reward_weights={"ones": 0.0})
    counted = weights_after("counted", Judged)
    assert all(bool((a == b).all()) for a, b in zip(plain, recorded, strict=True))
    assert not all(bool((a == b).all()) for a, b in zip(plain, counted, strict=True))


def test_an_evaluation_during_training_is_judged(tmp_path: Path) -> None:
    with trainer_of(tmp_path, env_class=Judged) as trainer:
        metrics = trainer.evaluate(tasks(4))
    assert metrics["eval_rewards/ones/mean"] >= 0
    assert metrics["eval_info/judge_calls"] == 1.0


def test_a_judge_that_fails_fails_the_rollouts(tmp_path: Path) -> None:
    with (
        trainer_of(tmp_path, env_class=Unjudged) as trainer,
        pytest.raises(TooManyFailuresError, match=r"JudgeError: judge 'judge' \(CountingAlone\) gave two answers"),
    ):
        trainer.train()


@pytest.mark.parametrize("env_class", [Judged, Ranked, Unjudged])
def test_rollouts_ahead_of_training_are_judged(tmp_path: Path, env_class: Any) -> None:
    model, tokenizer = policy()
    args = settings(
        tmp_path, max_staleness=1, max_steps=3, store_rollouts=str(tmp_path / "store"), max_failed_fraction=0.5
    )
    with GRPOEnvTrainer(
        model,
        env_class(tokenizer),
        args,
        train_dataset=tasks(8),
        processing_class=tokenizer,
        agent=CopiedPolicyAgent(model, tokenizer),
    ) as trainer:
        if env_class is Unjudged:
            with pytest.raises(TooManyFailuresError, match="JudgeError"):
                trainer.train()
            return
        trainer.train()
    assert all(log["info/judge_calls"] > 0 for log in trainer.state.log_history if "reward" in log)
    records = [*RolloutStore(tmp_path / "store").records()]
    assert len(records) == 3 * 8
    assert all(len(record.trajectory.info["judgments"]) == 1 for record in records)


def test_task_groups_that_are_divided_among_ranks_cannot_be_ranked() -> None:
    def trials(env_class: Any, number: int) -> list[Any]:
        return env_class(policy()[1]).trials([{"seed": 0}], number)

    _check_complete_groups(trials(Ranked, 4), 4)
    _check_complete_groups(trials(Judged, 3), 4)
    with pytest.raises(
        ConfigError, match=r"needs complete task groups on each rank.*multiple of num_generations \(4\)"
    ):
        _check_complete_groups(trials(Ranked, 3), 4)


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
