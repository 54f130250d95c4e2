"""Stores with a bit of everything, and pages of them in a browser."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from agentsgym import RolloutStore, StopReason, Trajectory, Turn
from agentsgym.viewer import write_page
from agentsgym.viewer.answers import Answers
from agentsgym.viewer.server import SERVED_LIMIT, ViewerServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
GROUP = 4  # rollouts of a task group
WORDS = ["<unknown>", "system", "is", "it", "alive", "a", "clock", "yes", "no", "board", "<end>"]
QUESTIONS = ["is it alive", "is it a clock", "is it a board"]
BOARD = "yes\n| X |   | O |\n|   | X |   |\n| O |   |   |"
HOSTILE = (
    "<script>window.hacked = 1</script></script><!-- <img src=x onerror='window.hacked = 1'>"
    "<svg onload=alert(1)> \x1b[31mred\x1b[0m \u202eabc\u202c nul \x00 end javascript:alert(1) ${window.hacked = 1}"
)
HOSTILE_GROUP = 1  # the task group whose rollouts are hostile
LONG = "word " * 60_000


def ids_of(text: str) -> list[int]:
    return [WORDS.index(word) if word in WORDS else 0 for word in text.split()]


class Recorder:
    """Makes one rollout, message by message."""

    def __init__(self, draws: random.Random) -> None:
        self.draws = draws
        self.ids: list[int] = []
        self.columns: dict[str, list[float]] = {
            name: [] for name in ("logprobs", "per_token_rewards", "advantages", "trainer_logprobs", "entropies")
        }
        self.messages: list[dict[str, Any]] = []
        self.turns: list[Turn] = []

    def _put(self, ids: Sequence[int], numbers: dict[str, list[float]] | None = None) -> None:
        self.ids += ids
        for name, column in self.columns.items():
            column.extend(numbers[name] if numbers else [0.0] * len(ids))

    def observe(self, text: str, role: str = "user") -> None:
        self.messages.append({"role": role, "content": text})
        self._put(ids_of(text))

    def act(self, text: str, reward: float, *, invalid: bool, **message: Any) -> None:
        ids = [*ids_of(text), WORDS.index("<end>")]
        advantage = self.draws.gauss(0, 1)
        sampled = [-self.draws.expovariate(1.0) for _ in ids]
        self.turns.append(
            Turn(
                start=len(self.ids),
                stop=len(self.ids) + len(ids),
                reward=reward,
                invalid=invalid,
                message_index=len(self.messages),
            )
        )
        self.messages.append({"role": "assistant", "content": text, **message})
        numbers = {
            "logprobs": sampled,
            "per_token_rewards": [reward / len(ids)] * len(ids),
            "advantages": [advantage] * len(ids),
            "trainer_logprobs": [value + self.draws.gauss(0, 0.01) for value in sampled],
            "entropies": [self.draws.expovariate(1.0) for _ in ids],
        }
        self._put(ids, numbers)


def record_of(index: int) -> tuple[Trajectory, dict[str, Any]]:
    """The rollout of a place: outcomes, lengths, runs and environments mixed, equal each time."""
    draws = random.Random(index)
    group = index // GROUP
    made = Recorder(draws)
    made.observe("system is it", role="system")
    failed = index % 19 == 7
    won = not failed and draws.random() < 0.4
    num_turns = draws.randint(2, 6)
    for turn in range(num_turns):
        seen = BOARD if turn == 1 else "yes" if turn % 2 else "no"
        made.observe(f"{HOSTILE} {seen}" if group == HOSTILE_GROUP else seen)
        shared = random.Random(group) if turn == 0 else draws  # all of a group begin alike
        text = shared.choice(QUESTIONS)
        invalid = turn > 0 and draws.random() < 0.2
        reward = -0.25 if invalid else float(won and turn == num_turns - 1)
        extra: dict[str, Any] = {}
        if turn == 1:
            extra["reasoning_content"] = "a thought of six words here"
        if turn == 2:
            extra["tool_calls"] = [{"function": {"name": "look_up", "arguments": {"word": "clock"}}}]
        made.act(f"{HOSTILE} {text}" if group == HOSTILE_GROUP else text, reward, invalid=invalid, **extra)
    columns = {name: made.columns[name] for name in ("advantages", "trainer_logprobs", "entropies")}
    trajectory = Trajectory(
        token_ids=made.ids,
        turns=made.turns,
        messages=made.messages,
        final_reward=sum(turn.reward for turn in made.turns),
        stop_reason=StopReason.FAILED if failed else StopReason.DONE if won else StopReason.MAX_TURNS,
        logprobs=made.columns["logprobs"],
        per_token_rewards=made.columns["per_token_rewards"],
        task_index=group % 3,
        rollout_index=index % GROUP,
        info={"success": won, "text": HOSTILE if group == HOSTILE_GROUP else "fine"},
        error=f"the game raised ValueError: {HOSTILE}" if failed else None,
        task_data={"seed": group % 3},
    )
    return trajectory, columns


def write_store(folder: Path, count: int) -> RolloutStore:
    """Write a store of training, a task group after another."""
    with RolloutStore.writer(folder, flush_every=512, source="training", agent="policy") as writer:
        tokenizer = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unknown>"))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        name = writer.keep_tokenizer(tokenizer)
        for index in range(count):
            trajectory, columns = record_of(index)
            group = index // GROUP
            writer.add(
                trajectory,
                **columns,
                tokenizer=name,
                env_class_path=["my_games.Clocks", "my_games.Boards"][group % 3 == 2],
                env_config={"max_steps_per_episode": 6},
                run=f"run-{int(index >= count // 2)}",
                step=group // 3,
                generation=group // 3 + 1,
                group=group % 3,
                created_at=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=index),
                extra={"is_trained": index % 11 != 5},
            )
    return RolloutStore(folder)


def settled(page: Page, *parts: str, without: Sequence[str] = ()) -> Page:
    """Wait until the page shows all of an address in which these parts stand, and those others do not.

    Nothing may be read, nor pressed, while the page still becomes what was requested.
    """
    wanted = "".join(f'[data-settled*="{part}"]' for part in parts)
    page.wait_for_selector(
        f"html[data-settled]{wanted}" + "".join(f':not([data-settled*="{part}"])' for part in without)
    )
    return page


@dataclass
class Opened:
    """A page of a store in a browser, and whatever it complained of."""

    store: RolloutStore
    answers: Answers
    address: str
    context: BrowserContext
    complaints: list[str] = field(default_factory=list)
    page: Page = field(init=False)

    def __post_init__(self) -> None:
        self.page = self.context.new_page()
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)

    def go(self, **parameters: object) -> Page:
        """Open the page afresh at a view."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}#{'&'.join(f'{key}={value}' for key, value in parameters.items())}")
        return settled(self.page)

    def column(self, name: str) -> list[Any]:
        """A column of the list, as Python has it."""
        listed = self.answers.list()
        values, words = listed["columns"][name], listed["words"].get(name)
        return [None if value is None else words[value] for value in values] if words else values


@contextmanager
def serving(answers: Answers) -> Iterator[ViewerServer]:
    """Serve in a thread of its own."""
    with ViewerServer(answers) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def opened(browser: Browser, store: RolloutStore, mode: str, folder: Path, **context: Any) -> Iterator[Opened]:
    """Open a store in a window of its own, served or written; what the page complained of fails the test."""
    answers = Answers(store, limit=SERVED_LIMIT, mode="served")
    window = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
    window.set_default_timeout(15_000)
    try:
        if mode == "served":
            with serving(answers) as server:
                shown = Opened(store, answers, server.url, window)
                yield shown
        else:
            path = folder / "page.html"
            if not path.exists():
                write_page(store, path, limit=SERVED_LIMIT)
            shown = Opened(store, answers, path.as_uri(), window)
            yield shown
        assert shown.complaints == []
    finally:
        window.close()


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
