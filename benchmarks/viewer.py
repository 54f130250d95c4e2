"""Measure the viewer: writing a page, its size, opening it in headless Chromium, and scrolling its list.

The rollouts are hand-made, of the size that games have: eight turns, some 400 tokens, with log-probabilities and
advantages, in task groups of eight. A page counts as open when its list is drawn and can be used. Scrolling goes over
the whole list in 120 frames; told are the longest frame and the most rows that stood in the document.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from agentsgym import RolloutStore, StopReason, Trajectory, Turn
from agentsgym.viewer import write_page
from agentsgym.viewer.answers import Answers
from agentsgym.viewer.server import ViewerServer

TURNS, OBSERVED, SAID, GROUP = 8, 30, 20, 8  # turns, tokens of an observation and of an action, rollouts of a task
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


def rollout(index: int) -> tuple[Trajectory, list[float]]:
    """Make a rollout and its advantages."""
    draws = random.Random(index)
    length = TURNS * (OBSERVED + SAID)
    starts = [turn * (OBSERVED + SAID) + OBSERVED for turn in range(TURNS)]
    won = draws.random() < 0.5
    turns = [
        Turn(start=start, stop=start + SAID, reward=float(won and turn == TURNS - 1), message_index=2 * turn + 1)
        for turn, start in enumerate(starts)
    ]
    mask = [place % (OBSERVED + SAID) >= OBSERVED for place in range(length)]
    texts = [
        " ".join(draws.choices(["door", "key", "lamp", "north", "take", "open"], k=OBSERVED)) for _ in range(2 * TURNS)
    ]
    trajectory = Trajectory(
        token_ids=[draws.randrange(32_000) for _ in range(length)],
        turns=turns,
        messages=[{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)],
        final_reward=float(won),
        stop_reason=StopReason.DONE if won else StopReason.MAX_TURNS,
        logprobs=[-draws.expovariate(1.0) if own else 0.0 for own in mask],
        per_token_rewards=[0.0] * length,
        task_index=index // GROUP,
        rollout_index=index % GROUP,
        info={"success": won},
        task_data={"seed": index // GROUP},
    )
    advantage = draws.gauss(0, 1)
    return trajectory, [advantage if own else 0.0 for own in mask]


def store_of(folder: Path, number: int) -> RolloutStore:
    """Write so many rollouts, as training keeps them."""
    with RolloutStore.writer(folder, source="training", run="run", agent="policy", flush_every=1024) as writer:
        for index in range(number):
            trajectory, advantages = rollout(index)
            group = index // GROUP
            writer.add(trajectory, advantages=advantages, step=group // 8, generation=group // 8 + 1, group=group % 8)
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
    """Measure a store of so many rollouts, written and served."""
    folder = Path(tempfile.mkdtemp())
    try:
        store = store_of(folder / "rollouts", number)
        begun = time.perf_counter()
        page = write_page(store, folder / "page.html", limit=number)
        seconds = time.perf_counter() - begun
        written = {"write_s": round(seconds, 2), "megabytes": round(page.stat().st_size / 1e6, 2)}
        written |= opening(browser, page.as_uri(), repeats)
        with served(store, number) as address:
            return {"rollouts": number, "written": written, "served": opening(browser, address, repeats)}
    finally:
        shutil.rmtree(folder)


def report(results: Sequence[dict[str, Any]]) -> str:
    """Write the results as lines."""
    lines: list[str] = []
    for one in results:
        written = one["written"]
        lines.append(f"{one['rollouts']:,} rollouts: written in {written['write_s']} s, {written['megabytes']} MB")
        lines += [
            f"  {mode}: open in {one[mode]['open_s']} s, longest frame {one[mode]['longest_frame_ms']} ms, "
            f"{one[mode]['most_rows']} rows in the document at most"
            for mode in ("written", "served")
        ]
    return "\n".join(lines)


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description="Measure the viewer.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1_000, 10_000], help="how many, size after size")
    parser.add_argument("--quick", action="store_true", help="so few rollouts that it takes seconds")
    arguments = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("there is no chromium on this machine")
    sizes, repeats = ((16,), 1) if arguments.quick else (tuple(arguments.rollouts), 5)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        results = [measured(browser, number, repeats) for number in sizes]
        browser.close()
    print(json.dumps(results, indent=1) if arguments.json else report(results))


if __name__ == "__main__":
    main()
