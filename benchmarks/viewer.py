"""How long a page of stored rollouts takes to write, how large it is, and how soon its list is drawn in Chromium.

Run it from the repository::

    python benchmarks/viewer.py --rollouts 1000 10000

The rollouts are those of the untrained embedded policy in Twenty Questions, stored with advantages, eight a task group,
of which as many copies are written as are asked for.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.store.reader import RolloutStore
from agentsgym.tiny import tiny_policy
from agentsgym.types import Trajectory
from agentsgym.viewer.answers import Answers
from agentsgym.viewer.written import write_page

_NUM_PLAYED: Final = 128
_GROUP: Final = 8
_BATCH: Final = 64


def main() -> None:
    """Measure, and print a row a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1000])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in given.rollouts:
            print(measured(Path(folder) / str(number), number))


def measured(folder: Path, number: int) -> str:
    """Write a store and its page, and say what that took."""
    store = _store(folder / "store", number)
    begin = time.perf_counter()
    answers = Answers(store, limit=number, mode="served")
    listed_s = time.perf_counter() - begin
    begin = time.perf_counter()
    answers.turns()
    turns_s = time.perf_counter() - begin
    begin = time.perf_counter()
    page = write_page(store, folder / "page.html", limit=number)
    written_s = time.perf_counter() - begin
    drawn_s = _drawn_s(page)
    drawn = "no chromium here" if drawn_s is None else f"{drawn_s:.2f} s until the list is drawn"
    return (
        f"{number:,} rollouts: list {listed_s:.2f} s, curves {turns_s:.2f} s, page written in {written_s:.1f} s, "
        f"{page.stat().st_size / 1e6:.1f} MB, {drawn}"
    )


def _store(folder: Path, number: int) -> RolloutStore:
    env = TwentyQuestionsEnv(env_config={"max_steps_per_episode": 8})
    model, tokenizer = tiny_policy(env)
    env = TwentyQuestionsEnv(tokenizer, env.env_config)
    tasks: list[dict[str, Any]] = [{"solution": "dog", "seed": index} for index in range(_NUM_PLAYED // _GROUP)]
    played: Sequence[Trajectory] = env.rollout(tasks, PolicyAgent(model, tokenizer), _GROUP)
    with RolloutStore.writer(folder, source="training", run="r", agent="policy") as writer:
        name = writer.keep_tokenizer(tokenizer)
        for index in range(number):
            trajectory = played[index % len(played)]
            batch, place = divmod(index, _BATCH)
            advantages = [0.5 * mask for mask in trajectory.agent_token_mask]
            columns: dict[str, Any] = {"step": batch, "generation": batch + 1, "group": place // _GROUP}
            writer.add(
                trajectory,
                env_class_path="agentsgym.envs.TwentyQuestions.TwentyQuestionsEnv",
                env_config=env.env_config,
                tokenizer=name,
                advantages=advantages,
                **columns,
            )
    return RolloutStore(folder)


def _drawn_s(page: Path) -> float | None:
    """Seconds from opening a page to its list in headless Chromium; None without one."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    chromium = shutil.which("chromium")
    if chromium is None:
        return None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        view = browser.new_page()
        begin = time.perf_counter()
        view.goto(page.as_uri(), wait_until="commit")
        view.wait_for_selector("[role=row]", timeout=60_000)
        drawn_s = time.perf_counter() - begin
        browser.close()
    return drawn_s


if __name__ == "__main__":
    main()
