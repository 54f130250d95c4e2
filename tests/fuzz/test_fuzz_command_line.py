"""The command line with any arguments, and files and stores of any content with all that reads them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from command_line import ran
from crafted_stores import crafted_tables, damaged_files, put, sound_table, write_table
from hypothesis import given
from hypothesis import strategies as st
from outcomes import fuzzed, survives
from values import plain, texts

from agentsgym import RolloutStore, audit
from agentsgym.evaluation.compare import compare
from agentsgym.evaluation.replay import replay_all
from agentsgym.export import dpo_examples, kto_examples, sft_examples
from agentsgym.reports.frames import rollouts_frame
from agentsgym.reports.html import rollouts_html, trajectory_html
from agentsgym.store.columns import record_from_row
from agentsgym.store.records import record_to_line
from agentsgym.viewer.answers import Answers
from agentsgym.viewer.server import write_page

_OPTIONS = {
    "eval": [
        "-a",
        "-n",
        "-k",
        "-c",
        "--config-file",
        "--tasks",
        "--dataset",
        "--split",
        "--cluster-by",
        "--max-failed",
        "--max-concurrent",
        "--references",
        "--no-references",
        "--store",
        "--resume",
        "--seed",
        "--json",
        "--temperature",
        "--max-turn-tokens",
    ],
    "check": [
        "-c",
        "--tasks",
        "--dataset",
        "-a",
        "--tokenizer",
        "--max-tasks",
        "--limit-s",
        "--strict",
        "--seed",
        "--json",
    ],
    "audit": ["--where", "--tokenizer", "--json"],
    "export": ["--to", "-o", "--where", "--min-reward", "--project", "--run"],
    "replay": ["--where", "-n", "--env", "-c", "--json"],
    "compare": ["--where-a", "--where-b", "--where", "-n", "--seed", "--json"],
    "view": ["--where", "--limit", "--tokenizer", "--json"],
    "train": ["-s", "--json"],
    "play": ["-a", "-c", "--tasks", "--dataset", "--seed", "--store", "--temperature"],
    "envs": ["--text", "--players", "--status", "--offline", "--all", "--json"],
    "new": ["--folder", "--tools", "--mcp"],
}
_ALONE = {"--json", "--offline", "--all", "--tools", "--mcp", "--strict", "--resume", "--no-references"}
_WORDS = [
    "PriceList",
    "TwentyQuestions",
    "TextArena:TicTacToe-v0",
    "PriceList:x",
    "random",
    "reference",
    "scripted:script.json",
    "policy:none",
    "openai:x",
    "human",
    "file",
    "store",
    "lines",
    "folder",
    "loop",
    "missing",
    "game.py",
    "game.py:Game",
    "broken.py",
    "1",
    "0",
    "-1",
    "1.5",
    "nan",
    "inf",
    "1e400",
    "9" * 5000,
    "max_steps_per_episode=2",
    "a=[" + "[" * 5000,
    "max_price=3",
    "step>1",
    "final_reward>=nan",
    "success=true",
    "agent=null",
    "run!=x",
    "step=" + "9" * 5000,
    "sft",
    "dpo",
    "kto",
    "inspect",
    "jsonl",
    "inspect:",
    "training.max_steps=0",
    "a.b=1",
    "environments.0.weight=[",
    "out/x/y",
    "size=2",
    "part=\ud800",
    "\udcff",
    "=",
    "a=1",
    "train",
    "eval",
    "0-3",
    "won",
]
_words = st.sampled_from(_WORDS) | texts.map(lambda text: text.replace("\x00", ""))


@st.composite
def commands(draw: st.DrawFn) -> list[str]:
    """A command with arguments that are nearly right."""
    name = draw(st.sampled_from([*_OPTIONS]))
    first = {
        "eval": "PriceList",
        "check": "PriceList",
        "train": "file",
        "play": "PriceList",
        "envs": "PriceList",
        "new": "Game",
    }
    words = [name, first.get(name, "store") if draw(st.integers(0, 3)) else draw(_words)]
    if name == "compare":
        words.append("store")
    if name == "eval":
        words += ["-n", "1"]
    for _ in range(draw(st.integers(0, 3))):
        option = draw(st.sampled_from(_OPTIONS[name])) if draw(st.integers(0, 9)) else draw(_words)
        words.append(option)
        if option not in _ALONE:
            words.append(draw(_words))
    if name == "view":
        words += ["-o", "page.html"]
    if name == "train":
        words += ["-s", "training.max_steps=none"]  # it never begins
    return words


@contextmanager
def _folder() -> Generator[Path]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


_contents = st.one_of(plain.map(json.dumps), texts).map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(
    max_size=9
)
_SOUND = sound_table()


@fuzzed(150)
@given(commands(), _contents, st.just(_SOUND) | crafted_tables())
def test_commands(arguments: list[str], content: bytes, table: Any) -> None:
    with _folder() as folder:
        for name in ("file", "lines", "script.json", "broken.py"):
            (folder / name).write_bytes(content)
        (folder / "folder").mkdir()
        (folder / "loop").symlink_to("loop")
        write_table(table, folder / "store")
        done = survives(ran, *arguments, typed=content.decode("utf-8", "replace"))
        if not isinstance(done, Exception):
            assert done.code in {0, 1, 2}, done
            assert "Traceback" not in done.err, done.err


def _views(store: RolloutStore) -> list[Callable[[], Any]]:
    return [
        lambda: store[0],
        lambda: store.record(-1).as_dict(),
        lambda: [*store],
        lambda: [one.as_dict() for one in store],
        store.table,
        store.to_pandas,
        store.to_datasets,
        lambda: store.filter(final_reward=lambda value: value == 1),
        lambda: store.filter(task_data=bool),
        lambda: audit(store),
        lambda: [trajectory_html(one) for one in store],
        lambda: rollouts_html(store),
        lambda: rollouts_frame(store),
        lambda: rollouts_frame(store, "turn"),
        lambda: rollouts_frame(store, "token"),
        lambda: [*sft_examples(store.records())],
        lambda: [*kto_examples(store.records())],
        lambda: [*dpo_examples(store.records())],
        lambda: compare(store, store),
        lambda: [*replay_all(store.records())],
    ]


def _viewer(store: RolloutStore) -> list[Callable[[], Any]]:
    answers = survives(Answers, store, limit=3, mode="served")
    if isinstance(answers, Exception):
        return []
    return [
        answers.list,
        answers.turns,
        lambda: answers.search("egg"),
        *(lambda row=row: answers.rollout(row) for row in range(1, 4)),
        *(lambda key=key: answers.group(key) for key in answers.index.groups),
    ]


def read_everything(path: Path) -> None:
    store = survives(RolloutStore, path)
    if isinstance(store, Exception):
        return
    for view in [*_views(store), *_viewer(store)]:
        survives(view, accepted=(IndexError,) if not len(store) else ())
    with tempfile.TemporaryDirectory() as other:
        survives(store.to_jsonl, Path(other) / "lines.jsonl")
        survives(RolloutStore.from_jsonl, Path(other) / "lines.jsonl", Path(other) / "again")
        survives(write_page, store, Path(other) / "page.html")


@fuzzed(40)
@given(crafted_tables())
def test_columns_of_strangers(table: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_table(table, Path(folder))
        read_everything(Path(folder))


@fuzzed(60)
@given(damaged_files())
def test_damaged_files(damaged: tuple[str, bytes | str]) -> None:
    name, content = damaged
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        put(path / name, content)
        read_everything(path)
        put(path / "__tokenizers", content)
        read_everything(path)


_LINE = json.loads(record_to_line(record_from_row(sound_table(), 0)))


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A line of JSON that is nearly a rollout."""
    line = json.loads(json.dumps(_LINE))
    own = line["trajectory"]
    for place in draw(st.lists(st.sampled_from([own["messages"][0], *own["turns"], own, line]), max_size=2)):
        name = draw(st.sampled_from(sorted(place)) if place and draw(st.integers(0, 5)) else texts)
        if draw(st.booleans()):
            place[name] = draw(plain)
        else:
            place.pop(name, None)
    text = json.dumps(line).encode()
    return text if draw(st.integers(0, 4)) else text[: draw(st.integers(0, len(text)))] + draw(st.binary(max_size=3))


@fuzzed(60)
@given(lines())
def test_lines_of_strangers(line: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "lines.jsonl").write_bytes(line + b"\n")
        store = survives(RolloutStore.from_jsonl, path / "lines.jsonl", path / "store")
        if isinstance(store, RolloutStore):
            read_everything(path / "store")
