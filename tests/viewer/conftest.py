"""A browser for each file, and one store, for the tests that look at the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browsing import CHROMIUM, Opened, opened, write_store
from playwright.sync_api import Browser, sync_playwright

from agentsgym.store.reader import RolloutStore

NUM_ROLLOUTS = 240


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run chromium until the file ends; while it runs, playwright's event loop is this thread's running one."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> RolloutStore:
    return write_store(tmp_path_factory.mktemp("kept") / "rollouts", NUM_ROLLOUTS)


@pytest.fixture(params=["served", "written"])
def either(request: pytest.FixtureRequest, browser: Browser, kept: RolloutStore) -> Iterator[Opened]:
    """The page, served and written."""
    with opened(browser, kept, request.param, kept.path.parent) as shown:
        yield shown


@pytest.fixture
def served(browser: Browser, kept: RolloutStore) -> Iterator[Opened]:
    with opened(browser, kept, "served", kept.path.parent) as shown:
        yield shown
