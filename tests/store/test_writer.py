"""Writing: when a part is written, full disks, kills, forks, several writers at once."""

from __future__ import annotations

import errno
import logging
import os
import signal
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from stored import indices_of, rollout, run_python, stored

from agentsgym import ConfigError, RolloutStore, StoreError
from agentsgym.store import parts, writer


def num_parts(path: Path) -> int:
    return len([*path.glob("*.parquet")])


def wait_for_parts(path: Path, number: int) -> None:
    end = time.monotonic() + 20
    while num_parts(path) < number:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_part_is_written_when_enough_came_or_time_passed_or_it_is_requested(tmp_path: Path) -> None:
    with RolloutStore.writer(tmp_path / "number", flush_every=3) as writer:
        for index in range(3):
            writer.add(rollout(index))
        wait_for_parts(tmp_path / "number", 1)
        writer.add(rollout(3))
        writer.flush()
        assert num_parts(tmp_path / "number") == 2
    with RolloutStore.writer(tmp_path / "time", flush_seconds=0.02) as writer:
        writer.add(rollout(0))
        wait_for_parts(tmp_path / "time", 1)
    assert num_parts(tmp_path / "time") == 1  # closing adds no empty part


def test_a_closed_writer_takes_nothing_and_can_be_closed_again(tmp_path: Path) -> None:
    store = RolloutStore.writer(tmp_path)
    store.close()
    store.close()
    with pytest.raises(ConfigError, match=r"the writer of .* is closed"):
        store.add(rollout(0))


def test_threads_and_writers_side_by_side_lose_nothing_and_write_nothing_twice(tmp_path: Path) -> None:
    writers = [RolloutStore.writer(tmp_path, flush_every=5) for _ in range(3)]

    def add(first: int) -> None:
        for index in range(first, first + 40):
            writers[index % 3].add(rollout(index))

    threads = [threading.Thread(target=add, args=(first,)) for first in range(0, 200, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in writers:
        one.close()
    assert sorted(indices_of(RolloutStore(tmp_path))) == [*range(200)]


def test_two_writers_on_one_part_do_not_overwrite_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.time, "time_ns", lambda: 0)
    monkeypatch.setattr(writer.secrets, "token_hex", lambda _: "same")
    stored(tmp_path, range(3))
    stored(tmp_path, range(3, 6))
    assert indices_of(RolloutStore(tmp_path)) == [*range(6)]


def full_disk(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_reported_once_and_a_later_flush_writes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with RolloutStore.writer(tmp_path) as store:
        with monkeypatch.context() as full:
            full.setattr(parts.os, "fsync", full_disk)
            for index in range(3):
                store.add(rollout(index))
                with pytest.raises(StoreError, match=rf"{index + 1} rollouts cannot be written .*No space left"):
                    store.flush()
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert not [*tmp_path.iterdir()]
        store.add(rollout(3))
        store.flush()
    assert indices_of(RolloutStore(tmp_path)) == [0, 1, 2, 3]


def test_what_a_caller_learned_of_a_full_disk_is_not_reported_again_at_the_end_of_the_process(tmp_path: Path) -> None:
    code = """
        import errno, sys
        from stored import rollout
        from agentsgym.errors import StoreError
        from agentsgym.store import parts
        from agentsgym.store.reader import RolloutStore
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left")
        parts.os.fsync = full
        try:
            with RolloutStore.writer(sys.argv[1]) as store:
                store.add(rollout(0))
        except StoreError as error:
            print(error)"""
    done = run_python(textwrap.dedent(code), tmp_path)
    assert "1 rollouts cannot be written" in done.stdout
    assert len(done.stderr.splitlines()) == 1  # when it first happened


def test_a_disk_that_stays_full_raises_at_the_end_unless_something_else_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(parts.os, "fsync", full_disk)
        with pytest.raises(StoreError, match="1 rollouts cannot be written"), RolloutStore.writer(tmp_path) as store:
            store.add(rollout(0))
        other = RolloutStore.writer(tmp_path)
        other.add(rollout(1))
        with pytest.raises(KeyError, match="what the user did"), other:
            raise KeyError("what the user did")
    store.close()  # there is room again
    other.close()
    assert sorted(indices_of(RolloutStore(tmp_path))) == [0, 1]


def test_what_waits_for_a_full_disk_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "_MAX_UNWRITTEN", 50_000)
    store = RolloutStore.writer(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(parts.os, "fsync", full_disk)
        for index in range(20):
            store.add(rollout(index))
            with pytest.raises(StoreError):
                store.flush()
    store.close()
    kept = indices_of(RolloutStore(tmp_path))
    assert kept == [*range(20)][-len(kept) :]
    assert 0 < len(kept) < 20
    assert sum("1 rollouts are lost" in record.message for record in caplog.records) == 20 - len(kept)


def test_a_real_limit_of_the_file_system_loses_nothing(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from stored import rollout
from agentsgym import RolloutStore, StoreError
store = RolloutStore.writer(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for index in range(3):
    store.add(rollout(index))
    try:
        store.flush()
    except StoreError as error:
        print(error)
assert not [*Path(sys.argv[1]).iterdir()]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""  # and the end of the process writes them
    ran = run_python(code, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("File too large") == 3
    assert indices_of(RolloutStore(tmp_path)) == [0, 1, 2]


def test_a_kill_while_a_part_is_written_leaves_a_file_that_the_next_start_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = """
import os, signal, sys
from stored import rollout, stored
from agentsgym.store import parts
stored(__import__("pathlib").Path(sys.argv[1]), range(3))
parts.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
stored(__import__("pathlib").Path(sys.argv[1]), range(3, 6))
"""
    assert run_python(code, tmp_path).returncode == -signal.SIGKILL
    [left] = tmp_path.glob("*.unfinished")
    assert indices_of(RolloutStore(tmp_path)) == [0, 1, 2]
    assert f"contains 1 unfinished parts of processes that ended while writing: {left.name}" in caplog.text
    caplog.clear()
    stored(tmp_path, range(3, 6))
    assert left.name in caplog.text  # at the start of a writer too
    assert indices_of(RolloutStore(tmp_path)) == [*range(6)]


def test_what_a_living_writer_has_not_finished_is_nobodys_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []

    def look(_: int) -> None:
        seen.append(len([*tmp_path.glob("*.unfinished")]))
        parts.warn_of_unfinished(tmp_path)

    monkeypatch.setattr(parts.os, "fsync", look)
    stored(tmp_path, range(3))
    assert seen[0] == 1
    assert not caplog.records


def test_ctrl_c_in_the_midst_of_writing_loses_nothing(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from stored import rollout
from agentsgym import RolloutStore
from agentsgym.store import parts
import threading
sync = parts.os.fsync
def interrupted(descriptor):
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(0.05)
    sync(descriptor)
parts.os.fsync = interrupted
with RolloutStore.writer(sys.argv[1]) as store:
    for index in range(3):
        store.add(rollout(index))
    store.flush()
"""
    ran = run_python(code, tmp_path)
    assert "KeyboardInterrupt" in ran.stderr
    assert indices_of(RolloutStore(tmp_path)) == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_writes_its_own_rollouts_alone(tmp_path: Path) -> None:
    store = RolloutStore.writer(tmp_path)
    store.add(rollout(0))
    child = os.fork()
    if not child:
        store.add(rollout(1))
        store.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    store.close()
    assert sorted(indices_of(RolloutStore(tmp_path))) == [0, 1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_that_only_flushes_writes_nothing_and_waits_for_nobody(tmp_path: Path) -> None:
    store = RolloutStore.writer(tmp_path)
    store.add(rollout(0))
    with store._changed:  # as the writer's thread may hold it when the process forks
        child = os.fork()
        if not child:
            signal.alarm(5)
            store.flush()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    store.close()
    assert indices_of(RolloutStore(tmp_path)) == [0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_end_of_a_child_of_multiprocessing_is_the_end_of_a_process(tmp_path: Path, method: str) -> None:
    code = """if __name__ == "__main__":
        import multiprocessing, sys
        from stored import add_one
        child = multiprocessing.get_context(sys.argv[2]).Process(target=add_one, args=(sys.argv[1],))
        child.start()
        child.join()"""
    run_python(code, tmp_path, method)
    assert indices_of(RolloutStore(tmp_path)) == [7]


def test_a_rollout_that_cannot_be_stored_does_not_take_others_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts_to_table = writer.rollouts_to_table

    def breaking(records: Any) -> Any:
        assert all(record.trajectory.task_index != 1 for record in records), "a bug of ours"
        return rollouts_to_table(records)

    monkeypatch.setattr(writer, "rollouts_to_table", breaking)
    with pytest.raises(AssertionError, match="a bug of ours"):
        stored(tmp_path, range(3))
    assert indices_of(RolloutStore(tmp_path)) == [0, 2]


def test_a_folder_that_cannot_be_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"a rollout store at .*file: a file with this name exists"):
        RolloutStore.writer(tmp_path / "file")
