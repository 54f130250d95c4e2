"""Measure the viewer: writing a page, its size, opening it in headless Chromium, and scrolling its list.

The rollouts are those of the untrained embedded policy in Twenty Questions, stored with advantages, eight per task
group, and copied as often as requested. A page counts as open when its list is drawn and can be used. Scrolling covers
the whole list in 120 frames; the longest frame and the largest number of rows in the document are reported.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from agentsgym import PolicyAgent, RolloutStore, Trajectory, tiny_policy
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.viewer import write_page
from agentsgym.viewer.answers import Answers
from agentsgym.viewer.server import ViewerServer

NUM_PLAYED, GROUP, BATCH = 128, 8, 64  # games, rollouts of a task, of a generation batch
SCROLL = """async () => {
    const scroller = document.querySelector(".scroller");
    let [longest, rows, last] = [0, 0, performance.now()];
    for (let frame = 1; frame <= 120; frame++) {
        scroller.scrollTop = (scroller.scrollHeight * frame) / 120;
        await new Promise(requestAnimationFrame);
        const now = performance.now();
        longest = Math.max(longest, now - last);
        last = now;
        rows = Math.max(rows, document.querySelectorAll(".row").length);
    }
    return [longest, rows];
}"""


def store_of(folder: Path, number: int) -> RolloutStore:
    """Store copies of some games of the untrained embedded policy, as training keeps rollouts."""
    env = TwentyQuestionsEnv(env_config={"max_steps_per_episode": 8})
    model, tokenizer = tiny_policy(env)
    env = TwentyQuestionsEnv(tokenizer, env.env_config)
    tasks: list[dict[str, Any]] = [
        {"solution": "dog", "seed": index} for index in range(max(1, min(number, NUM_PLAYED) // GROUP))
    ]
    played: Sequence[Trajectory] = env.rollout(tasks, PolicyAgent(model, tokenizer), GROUP)
    with RolloutStore.writer(folder, source="training", run="r", agent="policy") as writer:
        name = writer.keep_tokenizer(tokenizer)
        for index in range(number):
            trajectory = played[index % len(played)]
            batch, place = divmod(index, BATCH)
            advantages = [0.5 * mask for mask in trajectory.agent_token_mask]
            columns: dict[str, Any] = {"step": batch, "generation": batch + 1, "group": place // GROUP}
            writer.add(
                trajectory,
                env_class_path="agentsgym.envs.TwentyQuestions.TwentyQuestionsEnv",
                env_config=env.env_config,
                tokenizer=name,
                advantages=advantages,
                **columns,
            )
    return RolloutStore(folder)


@contextmanager
def served(store: RolloutStore, limit: int) -> Generator[str]:
    """Serve a store in a thread of this process."""
    with ViewerServer(Answers(store, limit=limit, mode="served")) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def opening(browser: Browser, address: str, repeats: int) -> dict[str, float]:
    """Open a page some times in windows of their own; the fastest counts, as others use this machine too."""
    seconds: list[float] = []
    longest, rows = 0.0, 0
    for _ in range(repeats):
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        begun = time.perf_counter()
        page.goto(address, wait_until="commit")
        page.wait_for_selector("html[data-ready] .row")
        seconds.append(time.perf_counter() - begun)
        page.wait_for_timeout(500)
        longest, rows = page.evaluate(SCROLL)
        page.close()
    return {"open_s": round(min(seconds), 3), "longest_frame_ms": round(longest, 1), "most_rows": rows}


def measured(browser: Browser, number: int, repeats: int) -> dict[str, Any]:
    """Measure writing and serving a store of a number of rollouts."""
    folder = Path(tempfile.mkdtemp())
    try:
        store = store_of(folder / "rollouts", number)
        begun = time.perf_counter()
        answers = Answers(store, limit=number, mode="served")
        listed_s = time.perf_counter() - begun
        answers.turns()
        curves_s = time.perf_counter() - begun - listed_s
        begun = time.perf_counter()
        page = write_page(store, folder / "page.html", limit=number)
        seconds = time.perf_counter() - begun
        written = {"write_s": round(seconds, 2), "megabytes": round(page.stat().st_size / 1e6, 2)}
        written |= opening(browser, page.as_uri(), repeats)
        with served(store, number) as address:
            requests = {"list_s": round(listed_s, 3), "curves_s": round(curves_s, 3)}
            return {"rollouts": number, "written": written, "served": requests | opening(browser, address, repeats)}
    finally:
        shutil.rmtree(folder)


def report(results: Sequence[dict[str, Any]]) -> str:
    """Write the results as lines."""
    lines: list[str] = []
    for one in results:
        written = one["written"]
        lines.append(f"{one['rollouts']:,} rollouts: written in {written['write_s']} s, {written['megabytes']} MB")
        served = one["served"]
        lines.append(f"  from the store: the list in {served['list_s']} s, the curves in {served['curves_s']} s")
        lines += [
            f"  {mode}: open in {one[mode]['open_s']} s, longest frame {one[mode]['longest_frame_ms']} ms, "
            f"{one[mode]['most_rows']} rows in the document at most"
            for mode in ("written", "served")
        ]
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description="Measure the viewer.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1_000, 10_000], help="how many, size after size")
    parser.add_argument("--quick", action="store_true", help="so few rollouts that it takes seconds")
    arguments = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("chromium is not installed")
    sizes, repeats = ((16,), 1) if arguments.quick else (tuple(arguments.rollouts), 5)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        results = [measured(browser, number, repeats) for number in sizes]
        browser.close()
    print(json.dumps(results, indent=1) if arguments.json else report(results))


if __name__ == "__main__":
    main()
