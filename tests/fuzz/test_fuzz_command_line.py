"""The command line with any arguments, and files and stores of any content."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from command_line import ran
from crafted_stores import crafted_tables, sound_table, write_table
from hypothesis import given
from hypothesis import strategies as st
from outcomes import fuzzed, survives
from values import plain, texts

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
