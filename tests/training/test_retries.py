"""Failed rollouts are logged once a kind and played again, and a run may end at the first failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from games import GuessNumber, policy, settings, tasks

from agentsgym import GRPOEnvTrainer, TooManyFailuresError


class Flaky(GuessNumber):
    """Cannot start in the first attempt of every other session."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: dict[str, list[int]] = {}

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        self.seen.setdefault(session_id, []).append(task_data["seed"])
        is_first = len(self.seen[session_id]) == 1
        return super()._initialize_episode(
            session_id, {"cannot_start": is_first and len(self.seen) % 2 == 0, **task_data}
        )


def trained(folder: Path, env_class: Any = Flaky, **changes: Any) -> tuple[Any, Any]:
    model, tokenizer = policy()
    env = env_class(tokenizer)
    trainer = GRPOEnvTrainer(model, env, settings(folder, **changes), train_dataset=tasks())
    trainer.train()
    return env, trainer


def numbers(trainer: Any) -> list[dict[str, float]]:
    timed = ("runtime", "second", "flos", "time")
    return [
        {key: value for key, value in row.items() if not any(word in key for word in timed)}
        for row in trainer.state.log_history
    ]


@pytest.mark.parametrize("retry_seed", ["same", "new"])
def test_failed_rollouts_are_played_again_and_alike_in_every_run(retry_seed: str, tmp_path: Path) -> None:
    changes = {"max_failed_fraction": 0.0, "episode_retries": 1, "retry_seed": retry_seed}
    env, trainer = trained(tmp_path, **changes)
    again = [seeds for seeds in env.seen.values() if len(seeds) == 2]
    assert len(again) == len(env.seen) // 2
    assert all((first == second) is (retry_seed == "same") for first, second in again)
    steps = [row for row in trainer.state.log_history if "rollouts/retried" in row]
    assert [row["rollouts/retried"] for row in steps] == [0.5, 0.5]
    assert [row["failed"] for row in steps] == [0.0, 0.0]
    _, other = trained(tmp_path, **changes)
    assert numbers(trainer) == numbers(other)


def test_nothing_is_drawn_otherwise_where_nothing_fails(tmp_path: Path) -> None:
    """Retries that are allowed and not needed change no number but their own."""
    _, without = trained(tmp_path, GuessNumber)
    _, allowed = trained(tmp_path, GuessNumber, episode_retries=2)
    for row in allowed.state.log_history:
        assert row.pop("rollouts/retried", 0.0) == 0.0
    assert numbers(without) == numbers(allowed)


def test_without_retries_they_count_as_failed_and_a_limit_of_none_ends_the_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(TooManyFailuresError, match=r"4 of 8 rollouts failed, more than max_failed_fraction = 0\.3"):
        trained(tmp_path, max_failed_fraction=0.3)
    with pytest.raises(TooManyFailuresError, match=r"1 of 8 rollouts failed, more than max_failed_fraction = 0\.0"):
        trained(tmp_path, max_failed_fraction=0.0)


class Broken(GuessNumber):
    """Breaks in every first step, and again when it is closed."""

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        raise OSError("gone")

    def _close_episode(self, session_id: str, state: dict[str, Any]) -> None:
        raise KeyError("no such room")


def test_a_kind_of_failure_is_logged_once_a_run_and_the_rest_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = policy()
    args = settings(tmp_path, max_failed_fraction=1.0, max_steps=2)
    trainer = GRPOEnvTrainer(model, Broken(tokenizer), args, train_dataset=tasks())
    for _ in range(2):
        caplog.clear()
        trainer.train()
        messages = [one.getMessage() for one in caplog.records if "of Broken, at " in one.getMessage()]
        logged = [message for message in messages if message.startswith("session ")]
        counts = [message.partition(": ") for message in messages if message.startswith("… and ")]
        assert [message.partition(" could not be closed: ")[1] != "" for message in logged] == [True, False]
        assert len(messages) == 4
        assert len({how_many for how_many, _, _ in counts}) == 1
        assert [cause.rpartition(" raised ")[2] for *_, cause in counts] == [
            "KeyError: 'no such room'",
            "OSError: gone",
        ]
