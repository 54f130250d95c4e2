"""What holds for every test of an environment."""

from __future__ import annotations

import pytest

from agentsgym.envs import opponents


@pytest.fixture(autouse=True)
def registered_players(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the players that a test registers."""
    monkeypatch.setattr(opponents, "_registered", dict(opponents._registered))
