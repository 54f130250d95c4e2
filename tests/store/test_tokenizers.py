"""Tokenizers beside the parts, and parts that were written before the newest columns."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
from stored import indices_of, rollout, stored

from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.errors import StoreError
from agentsgym.evaluation.run import evaluate
from agentsgym.store.reader import RolloutStore
from agentsgym.store.schema import ADDED_LATER
from agentsgym.store.stored_tokenizers import read_stored_tokenizer, read_tokenizer
from agentsgym.tiny import tiny_policy

TEXT = "Is it an animal? yes no"


def tokenizer() -> Any:
    return tiny_policy([TEXT])[1]


def test_a_tokenizer_is_kept_once_and_reads_as_it_was(tmp_path: Path) -> None:
    ours = tokenizer()
    with RolloutStore.writer(tmp_path / "a") as writer, RolloutStore.writer(tmp_path / "a") as other:
        name = writer.keep_tokenizer(ours)
        ours([TEXT, "yes"], padding=True, truncation=True, max_length=3)  # which leaves its mark in the serialization
        assert other.keep_tokenizer(ours) == writer.keep_tokenizer(ours.backend_tokenizer) == name
        writer.add(rollout(0), tokenizer=name)
    assert name is not None
    [file] = (tmp_path / "a" / "__tokenizers").iterdir()
    assert file.name == f"{name}.json"
    again = read_stored_tokenizer(tmp_path / "a", name)
    assert again is not None
    ids = ours(TEXT, add_special_tokens=False)["input_ids"]
    assert again.encode(TEXT, add_special_tokens=False).ids == ids
    store = RolloutStore(tmp_path / "a")
    assert store.record(0).tokenizer == name
    assert not store.skipped
    store.to_jsonl(tmp_path / "a.jsonl")
    assert RolloutStore.from_jsonl(tmp_path / "a.jsonl", tmp_path / "b").record(0).tokenizer == name


def test_tools_that_read_parquet_do_not_see_it(tmp_path: Path) -> None:
    store = stored(tmp_path, range(3))
    with RolloutStore.writer(tmp_path) as writer:
        writer.keep_tokenizer(tokenizer())
    assert len(pq.read_table(tmp_path)) == len(store) == 3
    rows = datasets.load_dataset("parquet", data_dir=str(tmp_path), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(rows) == 3


def test_evaluations_keep_theirs(tmp_path: Path) -> None:
    env = TwentyQuestionsEnv(env_config={"max_steps_per_episode": 1})
    model, ours = tiny_policy(env)
    evaluate(type(env)(ours, env.env_config), PolicyAgent(model, ours), [{"solution": "dog"}], store=tmp_path / "a")
    record = RolloutStore(tmp_path / "a").record(0)
    assert record.tokenizer is not None
    found = read_stored_tokenizer(tmp_path / "a", record.tokenizer)
    assert found is not None
    assert found.decode([*record.trajectory.token_ids], skip_special_tokens=False) == ours.decode(
        record.trajectory.token_ids
    )


def test_what_has_no_serialization_is_not_kept(tmp_path: Path) -> None:
    with RolloutStore.writer(tmp_path) as writer:
        assert writer.keep_tokenizer(None) is None
        assert writer.keep_tokenizer(object()) is None
    assert [*tmp_path.iterdir()] == []


def test_a_full_disk_leaves_no_part_of_it_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with RolloutStore.writer(tmp_path) as writer, monkeypatch.context() as disk:
        disk.setattr("os.fsync", full)
        assert writer.keep_tokenizer(tokenizer()) is None
    assert [*tmp_path.rglob("*.*")] == []
    assert "the tokenizer cannot be saved" in caplog.text


def test_no_other_file_is_ever_read_as_one(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    for name in ("../secret", "x", "0" * 17, ""):
        with pytest.raises(StoreError, match="name must be 16 hexadecimal digits"):
            read_stored_tokenizer(tmp_path, name)
    assert read_stored_tokenizer(tmp_path, "0" * 16) is None
    with pytest.raises(StoreError, match="cannot load a tokenizer from"):
        read_tokenizer(tmp_path / "secret.json")


def test_parts_without_the_newest_columns_are_read_with_nulls_in_them(tmp_path: Path) -> None:
    stored(tmp_path, range(2))
    [part] = tmp_path.glob("*.parquet")
    table = pq.read_table(part)
    pq.write_table(table.drop_columns([*ADDED_LATER]), part)
    with RolloutStore.writer(tmp_path) as writer:
        writer.add(rollout(2), tokenizer="t", entropies=[0.5] * 4)
    store = RolloutStore(tmp_path)
    assert indices_of(store) == [0, 1, 2]
    assert [one.tokenizer for one in store.records()] == [None, None, "t"]
    assert [one.entropies for one in store.records()] == [None, None, [0.5] * 4]
    assert indices_of(store.filter(tokenizer="t")) == [2]
    assert len(store.table()) == len(store.to_datasets()) == 3
    assert store.table(["entropies", "seed"]).column("entropies").to_pylist() == [None, None, [0.5] * 4]
    line = json.loads(store.to_jsonl(tmp_path / "x.jsonl").read_text().splitlines()[0])
    assert line.pop("tokenizer") is line.pop("entropies") is None
    (tmp_path / "old.jsonl").write_text(json.dumps(line))  # a line of an earlier release
    assert RolloutStore.from_jsonl(tmp_path / "old.jsonl", tmp_path / "b").record(0).entropies is None


def test_a_view_knows_its_place_in_the_whole(tmp_path: Path) -> None:
    stored(tmp_path, range(5))
    store = stored(tmp_path, range(5, 10))
    view = store.filter(task_index=lambda index: index % 3 == 0)[1:]
    assert [*view.rows] == [3, 6, 9]
    assert [*view[1:].unfiltered.rows] == [*store.rows] == [*range(10)]
