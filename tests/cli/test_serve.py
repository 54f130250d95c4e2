"""``agentsgym serve`` and ``agentsgym view``: what they print, play and write, and how they end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from command_line import GAME, ran, shell
from stored import stored
from websockets.sync.client import connect

from agentsgym import RolloutStore, tiny_policy

CLOSING = """
class Closing(Guess):
    def _close_episode(self, session_id, state):
        print("closed", session_id, flush=True)
"""


@pytest.fixture
def game(tmp_path: Path) -> Path:
    path = tmp_path / "games_to_serve.py"
    path.write_text(GAME + CLOSING)
    return path


def started(*arguments: str | Path, num_envs: int = 1) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Start the server; return it, and the addresses that it prints."""
    process = shell("serve", *arguments, "--port", "0")
    assert process.stdout is not None
    return process, dict(process.stdout.readline().strip().split(" at ") for _ in range(num_envs))


def reported(connection: Any, kind: str, data: Any) -> dict[str, Any]:
    connection.send(json.dumps({"type": kind, "data": data}))
    return json.loads(connection.recv(timeout=60))["data"]


def ws(address: str) -> Any:
    return connect(address.replace("http", "ws", 1) + "/ws", proxy=None)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_closes_the_sessions_and_ends_the_server(game: Path, number: signal.Signals, code: int) -> None:
    process, addresses = started(f"{game}:Closing")
    with ws(addresses["Closing"]) as one, ws(addresses["Closing"]) as other:
        reported(one, "reset", {"seed": 1})
        reported(other, "reset", {"seed": 2})
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert out.count("closed ") == 2
    assert "Traceback" not in err
    assert "press Ctrl-C to stop" in err


def test_several_environments_take_their_options_and_tasks(game: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"secret": 1}\n{"secret": 2}\n')
    arguments = (f"{game}:Guess", f"{game}:Closing", "--tasks", tasks, "-c", "max_steps_per_episode=2")
    process, addresses = started(*arguments, "--max-sessions", "1", "--threads", "2", num_envs=2)
    try:
        assert [*addresses] == ["Guess", "Closing"]
        assert addresses["Guess"].endswith("/Guess")
        with ws(addresses["Guess"]) as connection:
            reported(connection, "reset", {"index": 1})
            assert reported(connection, "step", {"message": "2"})["metadata"]["success"] is True
            reported(connection, "reset", {"split": "eval", "index": 0})
            assert [reported(connection, "step", {"message": "2"})["done"] for _ in range(2)] == [False, True]
            with ws(addresses["Closing"]) as second:
                assert json.loads(second.recv(timeout=60))["data"]["code"] == "CAPACITY_REACHED"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_policy_is_served_to_programs_and_their_sessions_are_stored(tmp_path: Path) -> None:
    model, tokenizer = tiny_policy(["Say a color. red blue"], hidden_size=32, num_heads=2)
    model.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    process = shell("serve", "--policy", tmp_path / "policy", "--store", tmp_path / "store", "--port", "0")
    assert process.stdout is not None
    url, key = (process.stdout.readline().strip().partition("=")[2] for _ in range(2))
    body = json.dumps({"model": "x", "messages": [{"role": "user", "content": "Say a color."}], "max_tokens": 2})
    request = urllib.request.Request(f"{url}/chat/completions", body.encode(), {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["choices"][0]["message"]["role"] == "assistant"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in err
    [one] = RolloutStore(tmp_path / "store")
    assert len(one.turns) == 1
    assert one.info["num_calls"] == 1


def test_an_environment_that_raises_is_a_remark_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "games_to_serve.py"
    path.write_text(GAME.replace("won = action", "1 / (action != 'raise')\n        won = action"))
    process, addresses = started(path)
    with ws(addresses["Guess"]) as connection:
        reported(connection, "reset", {"seed": 1})
        answer = reported(connection, "step", {"message": "raise"})
        assert answer["code"] == "EXECUTION_ERROR"
        assert "raised ZeroDivisionError: division by zero" in answer["message"]
        reported(connection, "reset", {"seed": 1})
        assert reported(connection, "step", {"message": "9"})["reward"] == 0.0
    process.send_signal(signal.SIGINT)
    err = " ".join(process.communicate(timeout=60)[1].split())
    assert "warning: task 0, rollout 0, turn 0 of Guess" in err
    assert "Traceback" not in err


def test_what_is_wrong_is_a_sentence(game: Path, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("")
    guess = f"{game}:Guess"
    for arguments, output in [
        (("TwentyQuestion",), "did you mean TwentyQuestions"),
        ((guess, guess), "two environments are called Guess: start a server for each"),
        ((guess, "--split", "test"), "split must be one of train, eval, got 'test'"),
        ((guess, "--tasks", tmp_path / "none.jsonl"), "contains no tasks"),
        ((guess, "-c", "max_step=1"), "max_step"),
        ((guess, "-c", "episodes_per_trial=2"), "must be 1 to be served, got 2"),
        ((guess, "--max-sessions", "0"), "--max-sessions"),
        ((), "name an environment to serve, or a policy with --policy"),
        ((guess, "--policy", "x"), "--policy serves a policy instead of environments"),
        (("--policy", "x", "--host", "0.0.0.0"), "a policy is served on 127.0.0.1 only"),
    ]:
        done = ran("serve", *arguments, columns=200)
        assert (done.code, output in done.words) == (2, True), done.words
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = ran("serve", guess, "--port", port, columns=200)
        assert (done.code, f"port {port} of 127.0.0.1 cannot be used: " in done.words) == (2, True)


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
    assert "showing the newest 5 of 20, without 15 of a; use --limit to show more" in done.words
    reported = ran("view", store, "--limit", "5", "--out", tmp_path / "2.html", "--json").json
    assert reported == {
        "path": str(tmp_path / "2.html"),
        "rollouts": 5,
        "total": 30,
        "bytes": (tmp_path / "2.html").stat().st_size,
    }


def test_what_is_wrong_with_a_view_is_a_sentence(store: Path, tmp_path: Path) -> None:
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
