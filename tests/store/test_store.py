"""Reading: rows, slices, filters, tables, tokenizers beside the parts; folders that are older or damaged."""

from __future__ import annotations

import errno
import json
import math
import tracemalloc
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from stored import indices_of, rollout, stored

from agentsgym import ConfigError, PolicyAgent, RolloutStore, StopReason, StoreError, evaluate, tiny_policy
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.evaluation.compare import compare
from agentsgym.reports.plots import curve_of
from agentsgym.store import parts
from agentsgym.store.records import StoredRollout
from agentsgym.store.schema import ADDED_LATER, SCHEMA, VERSION_KEY
from agentsgym.store.stored_tokenizers import read_stored_tokenizer, read_tokenizer


def test_parts_of_several_writers_are_one_store_in_the_order_of_writing(tmp_path: Path) -> None:
    stored(tmp_path, range(100), agent="first")
    store = stored(tmp_path, range(100, 150), agent="second")
    assert len(store) == 150
    assert indices_of(store) == [*range(150)]
    assert list(store) == [rollout(index) for index in range(150)]
    assert store[149] == store[-1] == rollout(149)
    assert store.record(120).agent == "second"
    assert repr(store) == f"RolloutStore({str(tmp_path)!r}, 150 rollouts)"
    with pytest.raises(IndexError, match=r"150 rollouts.* has no rollout 150"):
        store[150]


def test_runs_are_not_mixed(tmp_path: Path) -> None:
    for run in ("first", "second"):
        store = stored(tmp_path, range(4), run=run, source="training", generation=1)
    ask = r"of 2 runs: choose one with the column run, from 'first', 'second'"
    for mixed in (lambda: store.filter(generation=1), lambda: compare(store, store), lambda: curve_of(store)):
        with pytest.raises(ConfigError, match=ask):
            mixed()
    chosen = store.filter(generation=1, run="first")
    assert len(chosen) == len(compare(chosen, store.filter(run="second")).tasks) == 4
    assert len(curve_of(chosen).points) <= 1
    with pytest.raises(ConfigError, match="the column 'success' has no text, so it cannot be 'yes'"):
        store.filter(success="yes")


def test_slices_and_filters_are_stores_and_go_together(tmp_path: Path) -> None:
    stored(tmp_path, range(10), step=1)
    store = stored(tmp_path, range(10, 20), agent="b")
    assert indices_of(store[2:6][1:]) == [3, 4, 5]
    assert indices_of(store[::-7]) == [19, 12, 5]
    assert indices_of(store.filter(step=None)[:2]) == [10, 11]
    assert indices_of(store.filter(agent="b", final_reward=lambda reward: reward > 17)) == [18, 19]
    assert indices_of(store[5:15].filter(pc.field("seed") >= 9, step=1)) == [9]
    assert store.filter(task_index=7).record(0).step == 1
    assert indices_of(store.filter(task_data=lambda task: task["seed"] > 17)) == [18, 19]
    assert indices_of(store.filter(task_data={"seed": 3}, env_config=None, extra={})) == [3]
    assert len(store.filter(agent="c")) == 0
    assert list(store.filter(agent="c")) == []
    with pytest.raises(ConfigError, match="a rollout store has no column 'stepp'; did you mean 'step'"):
        store.filter(stepp=1)
    with pytest.raises(ConfigError, match=r"the filter expression cannot be evaluated: .*nothing.*\Z"):
        store.filter(pc.field("nothing") > 1)


def test_one_rollout_reads_one_row_group_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path, range(128))
    store = stored(tmp_path, range(128, 400))
    read: list[int] = []
    one_group = parts.read_row_group
    monkeypatch.setattr(
        "agentsgym.store.reader.read_row_group", lambda *a, **k: read.append(a[1]) or one_group(*a, **k)
    )
    assert store[140].task_index == 140
    assert len(read) == 1
    assert indices_of(store[128:256]) == [*range(128, 256)]
    assert len(read) <= 2


def test_tables_frames_and_datasets_hold_the_rows_of_the_view(tmp_path: Path) -> None:
    store = stored(tmp_path, range(70))[60:65]
    table = store.table(["task_index", "token_ids"])
    assert table.column_names == ["task_index", "token_ids"]
    assert table.column("task_index").to_pylist() == [*range(60, 65)]
    assert store.table().schema.equals(SCHEMA)
    frame = store.to_pandas()
    assert frame["final_reward"].tolist() == [60.0, 61.0, 62.0, 63.0, 64.0]
    assert "token_ids" not in frame
    rows = store.to_datasets(["token_ids", "final_reward"])
    assert rows[1] == {"token_ids": [61, 62, 63, 64], "final_reward": 61.0}
    assert store.filter(task_index=-1).table().num_rows == 0


def test_lines_of_json_make_the_same_store(tmp_path: Path) -> None:
    store = stored(tmp_path / "a", range(5), step=3, env_config={"a": (1,)})
    copy = RolloutStore.from_jsonl(store.to_jsonl(tmp_path / "rollouts.jsonl"), tmp_path / "b")
    assert list(copy.records()) == list(store.records())
    (tmp_path / "spaced.jsonl").write_text("\ufeff" + (tmp_path / "rollouts.jsonl").read_text() + "\n\n")
    assert [*RolloutStore.from_jsonl(tmp_path / "spaced.jsonl", tmp_path / "spaced")] == [*store]
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff")
    with pytest.raises(StoreError, match=r"bytes.jsonl, line 1 is not a stored rollout"):
        RolloutStore.from_jsonl(tmp_path / "bytes.jsonl", tmp_path / "c")
    (tmp_path / "bad.jsonl").write_text('{"trajectory": {}}\n')
    with pytest.raises(StoreError, match=r"bad.jsonl, line 1 is not a stored rollout"):
        RolloutStore.from_jsonl(tmp_path / "bad.jsonl", tmp_path / "c")


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_path_that_is_no_folder_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=f"there is no rollout store at .*{name}: expected a folder"):
        RolloutStore(tmp_path / name)


def test_an_empty_folder_is_a_store_without_rollouts(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    assert (len(store), list(store), store.table().num_rows, len(store.filter(step=1))) == (0, [], 0, 0)


def test_files_that_cannot_be_read_are_named_and_the_others_stay_readable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path, range(3))
    [good] = tmp_path.glob("*.parquet")
    (tmp_path / "cut.parquet").write_bytes(good.read_bytes()[:-100])
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "noise.parquet").write_bytes(b"PAR1" + b"x" * 1000)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign.parquet")
    newer = pq.read_table(good).replace_schema_metadata({VERSION_KEY: b"99"})
    pq.write_table(newer, tmp_path / "newer.parquet")
    (tmp_path / "README.txt").write_text("no part")
    store = RolloutStore(tmp_path)
    assert indices_of(store) == [0, 1, 2]
    assert {file.name for file in store.skipped} == {
        f"{name}.parquet" for name in ("cut", "empty", "noise", "foreign", "newer")
    }
    assert store.skipped[tmp_path / "foreign.parquet"] == "a parquet file, but not one of a rollout store"
    assert (
        "format version 99, but this version of agentsgym reads format 1" in store.skipped[tmp_path / "newer.parquet"]
    )
    [warning] = caplog.records
    assert (
        "5 of 6 parquet files cannot be read and are skipped: cut.parquet (not a complete parquet file"
        in warning.message
    )


def test_a_part_that_is_damaged_or_gone_after_opening_is_an_error_that_names_it(tmp_path: Path) -> None:
    store = stored(tmp_path, range(3))
    [part] = tmp_path.glob("*.parquet")
    data = bytearray(part.read_bytes())
    data[len(data) // 4] ^= 0xFF
    part.write_bytes(data)
    with pytest.raises(StoreError, match=f"{part.name} can no longer be read"):
        list(store)
    part.unlink()
    with pytest.raises(StoreError, match=f"{part.name} can no longer be read"):
        store[0]


def test_a_part_that_was_cut_is_skipped_and_read_again_under_another_name(tmp_path: Path) -> None:
    stored(tmp_path, range(3))
    [part] = tmp_path.glob("*.parquet")
    data = part.read_bytes()
    part.rename(tmp_path / "named otherwise.parquet")
    part.write_bytes(data[:-1])
    store = RolloutStore(tmp_path)
    assert (indices_of(store), [*store.skipped]) == ([0, 1, 2], [part])


@pytest.mark.parametrize("claimed", [1, 128, 201, 256, 500, 999_999_999])
def test_a_part_that_holds_other_rollouts_than_its_name_states_is_an_error(claimed: int, tmp_path: Path) -> None:
    stored(tmp_path, range(200)).to_pandas()  # what a process imports then is not counted below
    [part] = tmp_path.glob("*.parquet")
    part.rename(part.with_name(part.name.replace("-200.parquet", f"-{claimed}.parquet")))
    tracemalloc.start()
    try:
        with pytest.raises(
            StoreError, match=rf"-{claimed}\.parquet contains 200 rollouts, but its name implies {claimed}: "
        ):
            RolloutStore(tmp_path).to_pandas()
        assert tracemalloc.get_traced_memory()[1] < 8e6  # nothing as large as the name claims
    finally:
        tracemalloc.stop()


def test_a_part_that_claims_our_format_without_its_columns_is_an_error_that_names_it(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({VERSION_KEY: b"1"}), tmp_path / "claims.parquet")
    store = RolloutStore(tmp_path)
    with pytest.raises(StoreError, match=r"claims\.parquet"):
        store[0]
    with pytest.raises(StoreError, match=r"claims\.parquet"):
        store.table(["step"])


def test_stop_reasons_come_back_as_the_enum(tmp_path: Path) -> None:
    assert stored(tmp_path, range(1))[0].stop_reason is StopReason.DONE


def test_a_row_that_is_no_trajectory_is_named(tmp_path: Path) -> None:
    stored(tmp_path / "right", [1, 2])
    [part] = (tmp_path / "right").glob("*.parquet")
    table = pq.read_table(part)
    index = table.schema.get_field_index("stop_reason")
    wrong = table.set_column(index, table.schema.field(index), pa.array(["done", "bored"]))
    (tmp_path / "wrong").mkdir()
    pq.write_table(wrong, tmp_path / "wrong" / "part.parquet")
    store = RolloutStore(tmp_path / "wrong")
    assert store[0].task_index == 1
    with pytest.raises(
        StoreError, match="the rollout of session '' is not a valid trajectory: 'bored' is not a valid StopReason"
    ):
        store.record(1)


def test_as_a_dict_a_store_is_plain_json_with_everything_beside_each_rollout(tmp_path: Path) -> None:
    with RolloutStore.writer(tmp_path, agent="me", tools=({"name": "price"},)) as writer:
        for index in range(3):
            writer.add(rollout(index), advantages=[0.0, math.nan, 0.5, 0.5], extra={"seen": {1}})
    (tmp_path / "foreign.parquet").write_text("no parquet")
    store = RolloutStore(tmp_path)
    plain = store.as_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert (plain["path"], plain["num_rollouts"], len(plain["rollouts"])) == (str(tmp_path), 3, 3)
    assert [*plain["skipped"]] == [str(tmp_path / "foreign.parquet")]
    first = plain["rollouts"][0]
    beside = {one.name for one in fields(StoredRollout)} - {"trajectory"}
    assert first.keys() == store[0].as_dict().keys() | beside
    assert not store[0].as_dict().keys() & beside  # nothing hides anything
    assert {name: first[name] for name in store[0].as_dict()} == store[0].as_dict()
    assert (first["agent"], first["tools"], first["extra"]) == ("me", [{"name": "price"}], {"seen": [1]})
    assert first["advantages"] == [0.0, None, 0.5, 0.5]
    assert datetime.fromisoformat(first["created_at"]) == store.record(0).created_at
    assert [one["task_index"] for one in store[1:].as_dict()["rollouts"]] == [1, 2]


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
