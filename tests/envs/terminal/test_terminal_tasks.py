"""The tasks of the terminal: equal seeds, solvable in every family and level, checks that cannot be misled."""

from __future__ import annotations

import io
import os
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import ConfigError, TaskError, make
from agentsgym.envs.Terminal import TerminalEnv
from agentsgym.envs.Terminal.checks import Check, Folder, HasArchive, HasMode, HasText, Returns
from agentsgym.envs.Terminal.env import read_command
from agentsgym.envs.Terminal.programs import EVALUATION, TRAINING, Program
from agentsgym.envs.Terminal.shell import Capture, printable
from agentsgym.envs.Terminal.tasks import _WORDS, FAMILIES, GROUPS, LEVELS, Task, make_task

PROGRAMS = (*TRAINING, *EVALUATION)
task_values = st.tuples(
    st.sampled_from([*FAMILIES]), st.sampled_from(LEVELS), st.sampled_from(["train", "eval"]), st.integers(0, 2**62)
)


def written(task: Task, folder: Path) -> Folder:
    """The files of a task in a folder."""
    for name, content in task.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(0o644)
    return Folder(folder)


@given(task_values)
def test_a_task_follows_from_its_values_and_is_not_solved_at_the_start(values: Any) -> None:
    task = make_task(*values)
    assert task == make_task(*values)
    assert task.instruction.isprintable()
    assert not any(path.startswith(("/", "..")) or "//" in path for path in task.files)
    assert task.checks
    assert len({repr(check) for check in task.checks}) == len(task.checks)
    assert task.solution


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in GROUPS["programs"]])
def test_some_check_fails_at_the_start_and_what_must_stay_holds(family: str, tmp_path: Path) -> None:
    for seed in range(12):
        task = make_task(family, 1 + seed % 3, "train", seed)
        folder = written(task, tmp_path / str(seed))
        checks: list[Check] = [check for check in task.checks if not isinstance(check, Returns)]
        held = [check.holds(folder) for check in checks]
        assert not all(held)
        unchanged = [
            check for check in checks if isinstance(check, HasText) and task.files.get(check.path) == check.text
        ]
        assert all(check.holds(folder) for check in unchanged)


def test_words_of_training_and_evaluation_differ() -> None:
    train, evaluation = ({*_WORDS[part]} for part in ("train", "eval"))
    assert len(train) == len(_WORDS["train"])
    assert len(evaluation) == len(_WORDS["eval"])
    assert not train & evaluation
    assert not {one.name for one in TRAINING} & {one.name for one in EVALUATION}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_source_of_a_program_is_the_function_and_its_bug_is_one(program: Program) -> None:
    for has_bug in (False, True):
        names: dict[str, Any] = {}
        exec(program.source(has_bug=has_bug), names)
        assert callable(names[program.name])
    assert program.source(has_bug=True) != program.source()
    for seed in range(10):
        task = make_task("fix", 3, "train" if program in TRAINING else "eval", seed)
        for check in task.checks:
            assert isinstance(check, Returns)
            if check.function == program.name:
                found = [program.function(*arguments) for arguments in check.calls]
                assert found == check.expected


def test_datasets_have_equal_numbers_of_families_and_share_no_seed() -> None:
    train, evaluation = (
        make_rows(size=78) for make_rows in (TerminalEnv.get_train_dataset, TerminalEnv.get_eval_dataset)
    )
    tasks, fresh = ([row["task_data"] for row in rows] for rows in (train, evaluation))
    assert {*Counter((task["family"], task["level"]) for task in tasks).values()} == {2}
    assert not {task["seed"] for task in tasks} & {task["seed"] for task in fresh}
    assert {task["part"] for task in fresh} == {"eval"}
    assert TerminalEnv.get_train_dataset(size=78)[:] == train[:]
    assert TerminalEnv.get_train_dataset(size=78, seed=1)[:] != train[:]
    some = TerminalEnv.get_train_dataset(size=6, families=["programs", "fix", "grep"], level=2)
    assert Counter(row["task_data"]["family"] for row in some) == {"fix": 2, "write": 2, "grep": 2}
    assert {row["task_data"]["level"] for row in some} == {2}
    assert isinstance(make(train[0]), TerminalEnv)


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (
            {"families": ["renam"]},
            r"families must be None or a non-empty list of names from files, .*, got \['renam'\]",
        ),
        ({"families": []}, "families must be None or a non-empty list"),
        ({"level": 4}, "level must be 1, 2, 3 or None, got 4"),
        ({"level": True}, "level must be 1, 2, 3 or None, got True"),
    ],
)
def test_wrong_options_are_refused(option: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TerminalEnv.get_train_dataset(**option)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"family": "renam"}, r"task_data\['family'\] must be one of rename, .*, got 'renam'"),
        ({"family": ["rename"]}, r"task_data\['family'\] must be one of rename"),
        ({"level": 0}, r"task_data\['level'\] must be 1, 2 or 3, got 0"),
        ({"level": "1"}, r"task_data\['level'\] must be 1, 2 or 3, got '1'"),
        ({"part": "test"}, r"task_data\['part'\] must be 'train' or 'eval', got 'test'"),
        ({"famly": "rename"}, "famly"),
    ],
)
def test_wrong_tasks_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(TaskError, match=problem):
        TerminalEnv().check_task({"family": "rename", "level": 1, **change})


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"reward": "sparse"}, r"'reward'\] must be one of 'progress', 'success', got 'sparse'"),
        ({"command_timeout_s": 0}, r"'command_timeout_s'\] must be a positive number of seconds, got 0"),
        ({"max_output_bytes": 10}, r"'max_output_bytes'\] must be an int of at least 100, got 10"),
        ({"memory_mb": None}, r"'memory_mb'\] must be an int of at least 64, got None"),
        ({"isolation": "docker"}, r"'isolation'\] must be one of 'auto', 'namespaces', 'user', 'none', got 'docker'"),
    ],
)
def test_wrong_configurations_are_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TerminalEnv(env_config=config)


def test_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(ConfigError, match=r"TerminalEnv requires Linux or macOS, .* use it inside WSL"):
        TerminalEnv()


@pytest.mark.parametrize(
    ("answer", "command"),
    [
        ("ls -l\n", "ls -l"),
        ("First:\n```bash\ncd a\nls\n```\nThen more.", "cd a\nls"),
        ("```\nls\n```", "ls"),
        ("```\nls\n```\n```\npwd\n```", None),
        ("cat > a <<'END'\nx\nEND", "cat > a <<'END'\nx\nEND"),
        (" \n", ""),
    ],
)
def test_the_command_in_an_answer(answer: str, command: str | None) -> None:
    assert read_command(answer) == command


# Output


@given(st.lists(st.binary(max_size=30)), st.integers(2, 40))
def test_the_beginning_and_the_end_are_kept_however_the_output_is_cut(parts: list[bytes], limit: int) -> None:
    whole, half = b"".join(parts), limit // 2
    capture = Capture(limit)
    for part in parts:
        capture.add(part)
    if len(whole) <= 2 * half:
        assert capture.take() == printable(whole)
    else:
        note = f"\n[{len(whole) - 2 * half} bytes of output left out]\n"
        assert capture.take() == printable(whole[:half]) + note + printable(whole[-half:])
    assert capture.take() == ""


@given(st.binary())
def test_output_is_text_without_control_characters(data: bytes) -> None:
    text = printable(data)
    text.encode()
    assert not any((ord(letter) < 32 and letter not in "\t\n") or 127 <= ord(letter) < 160 for letter in text)


def test_escape_sequences_are_removed() -> None:
    assert printable(b"\x1b[1;31mred\x1b[0m\x1b]0;title\x07 \x1b(Bx\x1b=\r\n") == "red x\n"
    assert printable("naïve ☃".encode()) == "naïve ☃"


def test_unit_tests_take_no_time() -> None:
    assert printable(b"..\nRan 2 tests in 12.345s\n\nOK\nI ran in 1.234s\n") == (
        "..\nRan 2 tests in 0.000s\n\nOK\nI ran in 1.234s\n"
    )


# Checks


def test_a_text_is_compared_without_white_space_at_line_ends(tmp_path: Path) -> None:
    folder, check = Folder(tmp_path), HasText(path="a/b.txt", text="x\ny\n", gone="old")
    assert not check.holds(folder)
    (tmp_path / "a").mkdir()
    for text, holds in (("x\ny", True), ("x  \r\ny\n\n", True), ("x\n\ny", False), (" x\ny", False)):
        (tmp_path / "a" / "b.txt").write_bytes(text.encode())
        assert check.holds(folder) is holds
    (tmp_path / "a" / "b.txt").write_text("x\ny")
    (tmp_path / "old").symlink_to("nowhere")
    assert not check.holds(folder)


def test_a_check_follows_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    folder, outside = Folder(tmp_path / "home"), tmp_path / "outside"
    (tmp_path / "home").mkdir()
    outside.mkdir()
    (outside / "a").write_text("x")
    (tmp_path / "home" / "link").symlink_to(outside / "a")
    (tmp_path / "home" / "folder").symlink_to(outside)
    os.mkfifo(tmp_path / "home" / "pipe")
    (tmp_path / "home" / "large").write_bytes(b"x" * ((1 << 20) + 1))
    for name in ("link", "folder/a", "pipe", "large", "."):
        assert folder.read(name) is None
        assert not HasText(path=name, text="x").holds(folder)


def test_permissions_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").touch(0o600)
    assert HasMode(path="a", mode=0o600).holds(Folder(tmp_path))
    assert not HasMode(path="a", mode=0o644).holds(Folder(tmp_path))
    assert not HasMode(path="b", mode=0o600).holds(Folder(tmp_path))


def tar(path: Path, files: dict[str, str], mode: Any = "w:gz") -> None:
    """Write an archive."""
    with tarfile.open(path, mode) as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


def test_an_archive_has_exactly_the_files(tmp_path: Path) -> None:
    folder, check = Folder(tmp_path), HasArchive(path="a.tar.gz", files={"b/c": "x", "d": "y"})
    path = tmp_path / "a.tar.gz"
    assert not check.holds(folder)
    for files, holds in (({"b/c": "x", "./d": "y"}, True), ({"b/c": "x"}, False), ({"b/c": "x", "d": "z"}, False)):
        tar(path, files)
        assert check.holds(folder) is holds
    tar(path, {"b/c": "x", "d": "y", "e": ""})
    assert not check.holds(folder)
    tar(path, {"b/c": "x", "d": "y"}, mode="w")
    assert not check.holds(folder), "it is not compressed"
    path.write_bytes(os.urandom(1000))
    assert not check.holds(folder)
    tar(path, {"b/c": "x", "d": "\0" * (100 << 20)})
    assert path.stat().st_size < 1 << 20
    assert not check.holds(folder), "a bomb is not unpacked"
