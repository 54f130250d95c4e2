"""What the tests of households share: a folder of generated games, a few of each split."""

from pathlib import Path

import pytest

from agentsgym.envs.ALFWorld.households import SPLITS, TASK_TYPES, generate_households

collect_ignore = ["openenv_games.py"]  # a server: it runs in an environment of its own, with what it imports


@pytest.fixture(scope="session")
def households(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("households")
    generate_households(folder, dict.fromkeys(SPLITS, len(TASK_TYPES)))
    return folder
