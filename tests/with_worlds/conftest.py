"""What the tests of engines share: generated households, a few of each split; and how their process ends."""

import os
import sys
from pathlib import Path

import pytest

from tools.households import SPLITS, TASK_TYPES, generate_households

collect_ignore = ["openenv_games.py", "openenv_players.py"]  # they run in an environment of their own


@pytest.fixture(scope="session")
def households(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("households")
    generate_households(folder, dict.fromkeys(SPLITS, len(TASK_TYPES)))
    return folder


_status: list[int] = []


def pytest_sessionfinish(exitstatus: int) -> None:
    """Note what the process is to end with."""
    _status.append(int(exitstatus))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End without the destructors of the planner's library, copies of which crash beside torch."""
    if _status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status[0])
