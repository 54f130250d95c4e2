"""What holds for every test: one thread, no network, no display, and where a warning is an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parent.parent
RELAXED = (
    "tests/training",
    "tests/examples",
    "tests/with_vllm",
    "agentsgym/training",
)  # TRL and transformers warn for reasons of their own

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models: a second thread costs more than it brings
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"

settings.register_profile("agentsgym", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("agentsgym")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let warnings be warnings in tests that run foreign training code; everywhere else they are errors."""
    for item in items:
        if any(item.path.is_relative_to(ROOT / folder) for folder in RELAXED):
            item.add_marker(pytest.mark.filterwarnings("default"))
