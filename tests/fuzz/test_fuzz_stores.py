"""Stores, their lines of JSON, and everything that reads them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crafted_stores import crafted_tables, damaged_files, put, sound_table, write_table
from hypothesis import given
from hypothesis import strategies as st
from outcomes import fuzzed, survives
from values import plain, texts

from agentsgym.evaluation.compare import compare
from agentsgym.evaluation.replay import replay_all
from agentsgym.export import dpo_examples, kto_examples, sft_examples
from agentsgym.record_audit import audit
from agentsgym.reports.frames import rollouts_frame
from agentsgym.reports.html import rollouts_html, trajectory_html
from agentsgym.store.columns import record_from_row
from agentsgym.store.reader import RolloutStore
from agentsgym.store.records import record_to_line
from agentsgym.viewer.answers import Answers
from agentsgym.viewer.server import write_page


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
        *(lambda key=key: answers.what_if(key, {"estimator": "rloo"}) for key in answers.index.groups),
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
