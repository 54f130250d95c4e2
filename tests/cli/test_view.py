"""``agentsgym view``: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from command_line import ran, shell
from stored import stored


@pytest.fixture
def store(tmp_path: Path) -> Path:
    stored(tmp_path / "store", range(20), agent="a")
    stored(tmp_path / "store", range(20, 30), agent="b")
    return tmp_path / "store"


def test_a_page_is_written_and_nothing_is_overwritten(store: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = ran("view", store, "--out", page)
    assert (done.code, page.read_text()[:15]) == (0, "<!DOCTYPE html>")
    assert f"wrote 30 rollouts to {page}" in done.words
    again = ran("view", store, "--out", page)
    assert again.code == 2
    assert "already exists" in again.words


def test_the_limit_is_reported_in_the_terminal_and_in_json(store: Path, tmp_path: Path) -> None:
    done = ran("view", store, "--where", "agent=a", "--limit", "5", "--out", tmp_path / "1.html")
    assert "wrote 5 rollouts" in done.words
    assert "showing the newest 5 of 20; use --limit to show more" in done.words
    reported = ran("view", store, "--limit", "5", "--out", tmp_path / "2.html", "--json").json
    assert reported == {
        "path": str(tmp_path / "2.html"),
        "rollouts": 5,
        "total": 30,
        "bytes": (tmp_path / "2.html").stat().st_size,
    }


def test_what_is_wrong_is_a_sentence(store: Path, tmp_path: Path) -> None:
    for arguments, code, output in [
        ((tmp_path / "none",), 2, "there is no rollout store at"),
        ((store, "--where", "agent=c"), 2, "matches --where agent=c"),
        ((store, "--out", tmp_path / "none" / "page.html"), 1, "cannot be written: No such file or directory"),
        ((store, "--out", tmp_path / "p.html", "--port", "8000"), 2, "--port cannot be combined with --out"),
        ((store, "--tokenizer", tmp_path / "none", "--out", tmp_path / "p.html"), 1, "cannot load a tokenizer"),
        ((store, "--limit", "0"), 2, "--limit"),
        ((store, "--port", "70000"), 2, "--port"),
    ]:
        done = ran("view", *arguments, columns=200)
        assert (done.code, output in done.words) == (code, True), done.words
    assert not (tmp_path / "p.html").exists()


def test_a_port_in_use_is_reported_with_the_way_out(store: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = ran("view", store, "--port", str(port), columns=200)
    assert done.code == 2
    assert f"port {port} is in use: choose another --port" in done.words


def test_it_serves_until_ctrl_c_and_ends_quietly(store: Path) -> None:
    served = shell("view", store, "--json", "--limit", "7")
    assert served.stdout is not None
    lines: list[str] = []
    while not lines or lines[-1].strip() != "}":
        lines.append(served.stdout.readline())
        assert lines[-1], served.communicate()[1]
    reported = json.loads("".join(lines))
    assert (reported["rollouts"], reported["total"]) == (7, 30)
    with urllib.request.urlopen(reported["address"] + "data/list") as answer:
        assert json.load(answer)["shown"] == 7
    served.send_signal(signal.SIGINT)
    out, output = served.communicate(timeout=20)
    assert (served.returncode, out, output) == (0, "", "")


def test_neither_torch_nor_trl_is_loaded_to_look(store: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom agentsgym import RolloutStore\nfrom agentsgym.viewer import write_page\n"
        "import agentsgym.viewer.server\nwrite_page(RolloutStore(sys.argv[1]), sys.argv[2])\n"
        "print(sorted({'torch', 'trl', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, store, tmp_path / "p.html"],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
