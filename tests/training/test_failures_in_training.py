"""The failures of a training run are logged once a kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from games import GuessNumber, policy, settings, tasks

from agentsgym.training.trainer import GRPOEnvTrainer


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
