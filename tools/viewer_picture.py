"""Make the picture of the README: a policy is trained for a minute, and the viewer shows a rollout that it won.

``python -m tools.viewer_picture docs/viewer_tokens.png``; needs playwright and Chromium.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

from agentsgym import RolloutStore, train
from agentsgym.envs.TwentyQuestions.knowledge import DEMO_OBJECTS, DEMO_PROPERTIES
from agentsgym.store.records import StoredRollout
from agentsgym.viewer import write_page

GAME = {"objects": [*DEMO_OBJECTS], "properties": [*DEMO_PROPERTIES], "max_steps_per_episode": 7}
RECIPE: dict[str, Any] = {
    "model": "tiny",
    "environments": [{"class": "TwentyQuestions", "env_config": GAME}],
    "warm_start": {"player": "random", "num_episodes": 1000, "max_steps": 300},
    "training": {
        "max_steps": 120,
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "max_turn_tokens": 24,
        "learning_rate": 1e-3,
        "store_rollouts": True,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 0,
    },
    "evaluation": {"num_tasks": 16, "num_rollouts": 1},
}
NEWEST = 512  # rollouts that the page holds
WIDTH, HEIGHT = 1200, 900


def rollout_with_credit(store: RolloutStore) -> int:
    """The rollout with turns both above and below the baseline, as far as can be, as its row in the folder."""

    def spread(record: StoredRollout) -> float:
        turns, advantages = record.trajectory.turns, record.advantages
        if advantages is None or not 4 <= len(turns) <= 5:
            return -math.inf
        by_turn = [advantages[turn.start] for turn in turns]
        return min(max(by_turn), -min(by_turn))

    spreads = [spread(record) for record in store.records()]
    return store.rows[spreads.index(max(spreads))]


def photograph(page: Path, row: int, picture: Path) -> None:
    """Show the tokens of a rollout in headless Chromium, and keep what is seen."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        tab.goto(f"{page.as_uri()}#view=tokens&row={row}")
        tab.wait_for_function("document.documentElement.dataset.settled === location.hash")
        tab.screenshot(path=picture)
        browser.close()


def main() -> None:
    """Train, write the page, and photograph it."""
    parser = argparse.ArgumentParser(description="Make the picture of the README.")
    parser.add_argument("picture", type=Path, help="PNG file that is written")
    picture = parser.parse_args().picture
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        train({**RECIPE, "training": {**RECIPE["training"], "output_dir": str(output)}})
        store = RolloutStore(output / "rollouts").filter(source="training")[-NEWEST:]
        page = Path(folder) / "page.html"
        write_page(store, page)
        photograph(page, rollout_with_credit(store), picture)


if __name__ == "__main__":
    main()
