"""Stores whose files or columns somebody else wrote, read by everything that reads stores."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile import JSON, drawn, only_sentences
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentsgym import evaluate
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.cli.app import app
from agentsgym.credit.settings import CreditSettings
from agentsgym.envs.datasets.default_tasks import tasks_of
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.store.reader import RolloutStore
from agentsgym.tiny import tiny_policy

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]
NAMES = itertools.count()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of four rollouts, with a tokenizer and settings of credit."""
    folder = tmp_path_factory.mktemp("good") / "store"
    env = TwentyQuestionsEnv()
    _, tokenizer = tiny_policy(env)
    env = TwentyQuestionsEnv(tokenizer, {"max_steps_per_episode": 3})
    tasks = tasks_of(env, "train", {}, 2)
    agent = ScriptedAgent(["Is it alive?"], repeat_last=True)
    with RolloutStore.writer(folder, extra={"credit": CreditSettings().as_dict()}) as writer:
        evaluate(env, agent, tasks, num_rollouts=2, store=writer)
    return folder


def read_all(folder: Path, data: st.DataObject) -> None:
    """Read a store by every way that there is."""
    with only_sentences():
        store = RolloutStore(folder)
        store.table()
        store.to_pandas()
        store._repr_html_()
        store.as_dict()
        for index in range(len(store)):
            with only_sentences():
                store.record(index)
                trajectory = store[index]
                trajectory.as_dict()
                trajectory.to_pandas("token")
                trajectory._repr_html_()
    name = str(next(NAMES))
    commands: Sequence[Sequence[str | Path]] = (
        ["audit", folder],
        ["view", folder, "--out", folder.parent / f"{name}.html"],
        ["compare", folder, folder],
        ["replay", folder],
        *(
            ["export", folder, "--to", to, "-o", folder.parent / f"{name}.{to}"]
            for to in ("jsonl", "sft", "dpo", "kto")
        ),
        ["export", folder, "--to", "inspect", "-o", folder.parent / f"{name}.json"],
        ["audit", folder, "--where", data.draw(WHERE)],
    )
    for command in data.draw(st.lists(st.sampled_from(commands), min_size=1, max_size=3, unique_by=str)):
        result = CliRunner().invoke(app, list(map(str, command)), prog_name="agentsgym")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert "Traceback" not in result.output, result.output


def copied(good: Path, place: Path) -> tuple[Path, Path]:
    """Copy the store; return the copy and its part."""
    folder = place / str(next(NAMES)) / "store"
    shutil.copytree(good, folder)
    [part] = folder.rglob("*.parquet")
    return folder, part


def columns(num_rows: int) -> st.SearchStrategy[pa.Array]:
    """Columns of types and values that no rollout has."""
    numbers = st.one_of(st.none(), st.integers(-5, 2**40), st.sampled_from([2**62, -(2**62)]))
    floats = st.one_of(st.none(), st.floats())
    texts = st.one_of(st.none(), st.text(max_size=6), JSON.map(repr), st.sampled_from(["{}", "[]", "null", "{", "[1]"]))
    kinds: list[tuple[Any, pa.DataType]] = [
        (numbers, pa.int64()),
        (floats, pa.float64()),
        (texts, pa.string()),
        (st.booleans(), pa.bool_()),
        (st.binary(max_size=3), pa.binary()),
        (st.lists(numbers, max_size=6), pa.list_(pa.int64())),
        (st.lists(floats, max_size=6), pa.list_(pa.float32())),
        (st.lists(texts, max_size=4), pa.list_(pa.string())),
        (st.lists(st.lists(numbers, max_size=3), max_size=3), pa.list_(pa.list_(pa.int64()))),
        (st.just({"start": 0, "stop": -1}), pa.struct([("start", pa.int64()), ("stop", pa.int64())])),
    ]
    return st.one_of(
        st.lists(values, min_size=num_rows, max_size=num_rows).map(lambda rows, kind=kind: pa.array(rows, kind))
        for values, kind in kinds
    )


def same_type(column: pa.Array) -> st.SearchStrategy[pa.Array]:
    """Columns of the right type and wrong values."""

    def values(kind: pa.DataType) -> st.SearchStrategy[Any]:  # noqa: PLR0911  # one per type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return st.lists(values(kind.value_type), max_size=6)
        if pa.types.is_struct(kind):
            return st.fixed_dictionaries({field.name: values(field.type) for field in kind})
        if pa.types.is_dictionary(kind):
            return values(kind.value_type)
        if pa.types.is_boolean(kind):
            return st.booleans()
        if pa.types.is_integer(kind):
            high = 2 ** (kind.bit_width - 1) - 1
            return st.one_of(st.integers(0, 4), st.integers(-4, min(high, 2**40)))
        if pa.types.is_floating(kind):
            return st.floats(width=32)
        texts = st.one_of(st.text(max_size=6), st.sampled_from(["{}", "[]", "null", "{", '[{"role": 3}]', '"x"']))
        return texts if pa.types.is_string(kind) or pa.types.is_large_string(kind) else st.none()

    one = st.one_of(st.none(), values(column.type), values(column.type))
    return st.lists(one, min_size=len(column), max_size=len(column)).map(lambda rows: pa.array(rows, column.type))


WHERE = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["final_reward > 0", "step", "x = 1", "run != 'a'", "a =", "==", "step=1e400"]),
)


def test_columns(good: Path, tmp_path: Path) -> None:
    [part] = good.rglob("*.parquet")
    table = pq.read_table(part)

    @drawn(60, shrinks=False)
    @given(st.data())
    def read(data: st.DataObject) -> None:
        folder, copy = copied(good, tmp_path)
        changed = table
        for _ in range(data.draw(st.integers(1, 2))):
            index = data.draw(st.integers(0, len(changed.column_names) - 1))
            own = (
                same_type(changed.column(index).combine_chunks())
                if data.draw(st.integers(0, 2))
                else columns(len(table))
            )
            kind = data.draw(st.integers(0, 9))
            name = changed.column_names[index]
            changed = changed.drop([name]) if kind == 0 else changed.set_column(index, name, data.draw(own))
        pq.write_table(changed, copy)
        read_all(folder, data)
        shutil.rmtree(folder.parent)

    read()


def test_bytes(good: Path, tmp_path: Path) -> None:
    @drawn(40, shrinks=False)
    @given(st.data())
    def read(data: st.DataObject) -> None:
        folder, _ = copied(good, tmp_path)
        file = data.draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
        content = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, max(0, len(content) - 1)))
            content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        file.write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
        read_all(folder, data)
        shutil.rmtree(folder.parent)

    read()
