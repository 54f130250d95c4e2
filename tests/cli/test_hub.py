"""Environments go to the Hub and come back, and nothing that was pulled runs without ``--trust``."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from command_line import GAME, ran, shell
from hub_stand_in import TOKEN, HubStandIn
from huggingface_hub import constants

from agentsgym.cli.commands import hub as command

MARKED = "from pathlib import Path\n\nPath(__file__).with_name('ran').touch()\n" + GAME


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[HubStandIn]:
    """A stand-in of the Hub, which alice's token opens, and a folder to work in."""
    with HubStandIn() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", server.address)  # read from HF_ENDPOINT once
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        yield server
        server.shutdown()
        thread.join()


def written(**files: str) -> None:
    for name, text in files.items():
        path = Path(name.replace("__", "/").replace("_py", ".py").replace("_yaml", ".yaml"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_an_environment_goes_to_the_hub_and_comes_back_unrun(hub: HubStandIn, tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(MARKED)
    variables = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(tmp_path / "cache")}
    for arguments in (["push", "guess.py", "alice/game"], ["pull", "alice/game"]):
        process = shell(*arguments, cwd=tmp_path, **variables)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert "guess.py  imports agentsgym, pathlib" in out
    assert "Nothing was imported." in out
    assert f"agentsgym check {Path('game', 'guess.py')}:Guess" in out
    assert {path.name for path in (tmp_path / "game").iterdir()} == {"README.md", "guess.py"}
    assert (tmp_path / "game" / "guess.py").read_text() == MARKED
    assert not (tmp_path / "ran").exists()


def test_pulled_code_runs_with_trust_alone(hub: HubStandIn) -> None:
    hub.repos["eve/game"] = {"trusted_game.py": MARKED.encode(), "conftest.py": b"raise SystemExit"}
    assert ran("pull", "eve/game", "first").code == 0
    assert not Path("first/ran").exists()
    sys.modules.pop("trusted_game", None)
    trusting = ran("pull", "eve/game", "second", "--trust")
    assert trusting.code == 0
    assert Path("second/ran").exists()
    assert "Guess a number." in trusting.out
    assert "max_steps_per_episode" in trusting.out
    assert "Nothing was imported." not in trusting.out


def test_a_file_brings_its_test_its_configuration_and_what_it_imports(hub: HubStandIn) -> None:
    written(game_py=f"import words\n{GAME}", words_py="import letters, json", letters_py="", other_py="", secret="")
    written(test_game_py="import game", game_yaml="model: tiny")
    assert ran("push", "game.py", "alice/game", "--private").code == 0
    files = hub.repos["alice/game"]
    assert set(files) == {"README.md", "game.py", "words.py", "letters.py", "test_game.py", "game.yaml"}
    assert hub.private == {"alice/game"}
    card = files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: agentsgym\n")
    assert "## Guess\n\nGuess a number.\n" in card
    assert "agentsgym pull alice/game game\nagentsgym check game/game.py:Guess\n" in card


def test_a_folder_is_uploaded_without_what_is_hidden_and_with_its_own_page(hub: HubStandIn) -> None:
    written(package__game_py=GAME, package__data__words="a b", package__outputs__model="", package__README="")
    Path("package/README").rename("package/README.md")
    for name in (".env", ".git/config", "__pycache__/game.pyc"):
        Path("package", name).parent.mkdir(exist_ok=True)
        Path("package", name).write_text("hidden")
    Path("package/link").symlink_to(__file__)
    assert ran("push", "package", "alice/game").code == 0
    assert hub.repos["alice/game"] == {"README.md": b"", "data/words": b"a b", "game.py": GAME.encode()}
    assert ran("push", "package", "alice/game").code == 0  # a second time


def test_hidden_files_stay_on_the_hub_and_a_commit_can_be_named(hub: HubStandIn) -> None:
    hidden = {".gitattributes": b"", ".vscode/tasks.json": b"{}", "data/.git/hooks/x": b""}
    hub.repos["eve/game"] = {"game.py": GAME.encode(), "data/\x1b[31m\nwords": b"", **hidden}
    done = ran("pull", "eve/game", "deep/er", "--revision", hub.commit("eve/game"))
    assert done.code == 0
    assert {path.relative_to("deep/er").as_posix() for path in Path("deep/er").rglob("*") if path.is_file()} == {
        "game.py",
        "data/\x1b[31m\nwords",
    }
    assert "data/\\x1b[31m words\n" in done.out
    assert list(Path("deep").iterdir()) == [Path("deep/er")]


@pytest.mark.parametrize("lies", [{}, {"lfs": {"oid": hashlib.sha256(b"other").hexdigest(), "pointerSize": 1}}])
def test_a_file_that_differs_from_its_checksum_leaves_nothing(hub: HubStandIn, lies: dict[str, object]) -> None:
    hub.repos["eve/game"] = {"game.py": GAME.encode()}
    if lies:
        hub.claimed["game.py"] = {"lfs": {**dict(lies["lfs"]), "size": len(GAME)}}  # type: ignore[call-overload]
    hub.damaged = not lies
    done = ran("pull", "eve/game")
    assert done.code == 1
    assert "error: files of eve/game differ from their checksums: game.py" in done.words
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("pull eve/none", 1, "has no such repository or revision that you can read: eve/none"),
        ("pull eve/game --revision v9", 1, "has no such repository or revision that you can read: eve/game"),
        ("pull eve/not--valid/x y", 2, "REPO must be USER/NAME, got 'eve/not--valid/x'"),
        ("pull eve/text", 1, "eve/text defines no environment, that is, a class with the method _step_episode"),
        ("pull eve/odd", 1, f"{Path('odd', 'game.py')} is not valid Python: invalid syntax"),
        ("pull eve/huge", 2, "eve/huge has 101 MB, more than the 100 MB of an environment"),
        ("pull eve/game here", 2, "here already exists: name another folder"),
        ("push here.py eve/game", 2, "there is no folder or Python file here.py"),
        ("push here eve/game", 2, "here defines no environment"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(arguments: str, code: int, said: str, hub: HubStandIn) -> None:
    hub.repos["eve/game"] = {"game.py": GAME.encode()}
    hub.repos["eve/text"] = {"game.txt": b""}
    hub.repos["eve/odd"] = {"game.py": b"class"}
    hub.repos["eve/huge"] = {"game.bin": b""}
    hub.claimed["game.bin"] = {"size": 101_000_000}
    Path("here").mkdir()
    done = ran(*arguments.split())
    assert done.code == code
    assert said in done.words
    assert "Traceback" not in done.words


def test_pushing_needs_a_token_that_may_write(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    written(game_py=GAME)
    monkeypatch.setenv("HF_TOKEN", "hf_of_bob")
    assert (
        "refused the request for alice/game: your token may not do this" in ran("push", "game.py", "alice/game").words
    )
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "no/token")
    done = ran("push", "game.py", "alice/game")
    assert done.code == 1
    assert "there is no token for the Hub: run `hf auth login` or set HF_TOKEN" in done.words
    assert hub.repos == {}


def test_without_a_network_nothing_is_left(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    written(game_py=GAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    for arguments in (["push", "game.py", "alice/game"], ["pull", "alice/game"]):
        done = ran(*arguments)
        assert done.code == 1
        assert "error: alice/game cannot be transferred: " in done.words
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in ran("pull", "alice/game").words
    assert [path.name for path in Path().iterdir()] == ["game.py"]


def test_a_package_that_is_too_large_is_not_uploaded(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MAX_BYTES", 10)
    written(game_py=GAME)
    done = ran("push", "game.py", "alice/game")
    assert done.code == 2
    assert "keep large data in a dataset repository" in done.words
    assert hub.repos == {}
