"""``agentsgym export --to trackio``: into trackio's own database, read back with trackio's own functions."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trackio
from command_line import GAME, ran
from disks import no_room
from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import TRACKIO_DIR

from agentsgym.store.reader import RolloutStore
from agentsgym.types import StopReason, Trajectory, Turn

# Whatever TRL and transformers warn of while they are imported is theirs.
pytestmark = pytest.mark.filterwarnings("default")
HOSTILE = "\x1b[2J<script>alert(1)</script>\u202e\ud800"


def played(reward: float, seed: int = 0, answer: str = "go", **changes: Any) -> Trajectory:
    """Two turns, of which the last is paid."""
    messages = [{"role": role, "content": answer} for role in ("user", "assistant") * 2]
    turns = [Turn(start=1 + 3 * k, stop=3 + 3 * k, reward=k * reward, message_index=1 + 2 * k) for k in (0, 1)]
    values: dict[str, Any] = {
        "token_ids": [0] * 6,
        "turns": turns,
        "messages": messages,
        "final_reward": reward,
        "stop_reason": StopReason.DONE,
        "task_data": {"seed": seed},
        "info": {"success": reward > 0},
    }
    return Trajectory(**{**values, **changes})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A training run of three steps with an evaluation after it, and an evaluation of another player."""
    with RolloutStore.writer(tmp_path / "store") as writer:
        for step in range(3):
            for group, reward in enumerate([0.0, 1.0 + step]):
                writer.add(
                    played(reward, group),
                    run="the-run",
                    source="training",
                    step=step,
                    group=group,
                    generation=step + 1,
                    agent="policy",
                    env_class_path="my.games.Guess",
                    env_config={"turn_credit": "step"},
                    advantages=[0.0, 0.5, 0.5, 0.0, -1.0, -2.0],
                )
        for seed in range(4):
            writer.add(played(float(seed % 2), seed), run="the-run", source="evaluation", step=3, agent="policy")
        writer.add(played(0.0, stop_reason=StopReason.FAILED, error="it broke"), source="evaluation", agent="random")
    return tmp_path / "store"


def found(project: str, run: str) -> tuple[list[Any], list[Any]]:
    """The logs and the traces of a run, oldest step first."""
    logs = SQLiteStorage.get_logs(project, run)
    return sorted(logs, key=lambda one: one["step"]), SQLiteStorage.get_traces(project, run=run, sort="step_asc")


def test_metrics_by_step_and_traces_come_back(store: Path) -> None:
    done = ran("export", store, "--to", "trackio", "--project", "all of it")
    assert done.code == 0, done.words
    assert "wrote 11 rollouts as 2 runs to trackio project all of it" in done.words
    assert "trackio show --project 'all of it'" in done.words
    assert sorted(run.name for run in trackio.Api().runs("all of it")) == ["random", "the-run"]
    logs, traces = found("all of it", "the-run")
    assert [(one["step"], one["train/reward"], one["train/win_rate"]) for one in logs if "train/reward" in one] == [
        (0, 0.5, 0.5),
        (1, 1.0, 0.5),
        (2, 1.5, 0.5),
    ]
    assert logs[1]["train/reward/turn_01"] == 1.0
    assert (logs[3]["eval/win_rate"], logs[3]["eval/num_episodes"]) == (0.5, 4)
    assert logs[3]["eval/win_rate_low"] < 0.5 < logs[3]["eval/win_rate_high"]
    assert len(traces) == 10
    assert traces[0]["key"] == "train/rollouts"
    metadata = [one["metadata"] for one in traces]
    assert {tuple(one["turn_advantages"]) for one in metadata if "group" in one} == {(0.5, -1.5)}
    assert [one["reward"] for one in metadata if one.get("step") == 1] == [0.0, 2.0]
    assert {one["turn_rewards"][1] for one in metadata} == {0.0, 1.0, 2.0, 3.0}
    assert [one["role"] for one in traces[0]["messages"]] == ["user", "assistant"] * 2
    assert {one["environment"] for one in metadata} == {"Guess", ""}
    [failed] = found("all of it", "random")[1]
    assert (failed["metadata"]["status"], failed["metadata"]["error"]) == ("error", "it broke")
    run = next(one for one in trackio.Api().runs("all of it") if one.name == "the-run")
    assert run.config is not None
    assert run.config["environment"] == "my.games.Guess"


def test_what_was_evaluated_by_the_command_is_exported(tmp_path: Path) -> None:
    (tmp_path / "guess_of_trackio.py").write_text(GAME)
    sys.modules.pop("guess_of_trackio", None)
    game, kept = f"{tmp_path / 'guess_of_trackio.py'}:Guess", tmp_path / "store"
    report = ran("eval", game, "-a", "random", "-n", "8", "--store", kept, "--no-references", "--json").json
    assert ran("export", kept, "--to", "trackio", "--project", "evaluated", "--run", "mine").code == 0
    [log], traces = found("evaluated", "mine")
    results = report["agents"][0]["results"]
    assert (log["eval/reward"], log["eval/num_episodes"], len(traces)) == (results["mean_reward"], 8, 8)


def test_one_run_may_be_chosen_and_named(store: Path) -> None:
    options = ("--to", "trackio", "--project", "chosen", "--run", "mine")
    refused = ran("export", store, *options)
    assert refused.code == 2
    assert "these rollouts belong to 2 runs (['random', 'the-run'])" in refused.words
    assert ran("export", store, *options, "--where", "run=the-run", "--where", "source=training").code == 0
    assert [run.name for run in trackio.Api().runs("chosen")] == ["mine"]
    assert len(found("chosen", "mine")[1]) == 6
    again = ran("export", store, *options, "--where", "run=the-run")
    assert again.code == 2
    assert "already has a run 'mine'" in again.words
    assert len(found("chosen", "mine")[1]) == 6


def test_many_rollouts_of_one_step_are_one_point(tmp_path: Path) -> None:
    with RolloutStore.writer(tmp_path / "store") as writer:
        for seed in range(600):
            writer.add(played(float(seed % 3 == 0), seed), source="play", agent="person")
    assert ran("export", tmp_path / "store", "--to", "trackio", "--project", "many").code == 0
    logs, traces = found("many", "person")
    assert len(traces) == 600
    assert [one["play/win_rate"] for one in logs if "play/win_rate" in one] == [200 / 600]


def test_hostile_text_arrives_inert(tmp_path: Path) -> None:
    own = played(1.0, answer=HOSTILE, info={HOSTILE: HOSTILE}, task_data={HOSTILE: [HOSTILE]})
    with RolloutStore.writer(tmp_path / "store") as writer:
        writer.add(own, run=HOSTILE, agent=HOSTILE, source=HOSTILE, env_class_path=HOSTILE, env_config={HOSTILE: 1})
        roles = [replace(turn, role=HOSTILE) for turn in own.turns]
        writer.add(replace(own, turns=roles), run=HOSTILE)
        writer.add(replace(own, messages=[{"role": HOSTILE, "content": "x" * 1_000_000}] * 4), run=HOSTILE)
    done = ran("export", tmp_path / "store", "--to", "trackio", "--project", "hostile")
    assert done.code == 0, done.words
    [run] = trackio.Api().runs("hostile")
    logs, traces = found("hostile", run.name)
    shown = "".join([run.name, str(run.config), str(logs), str(traces), done.out])
    assert not set(shown) & {"\x1b", "\u202e", "\ud800"}
    assert max(len(one["content"]) for trace in traces for one in trace["messages"]) <= 20_000


@pytest.mark.parametrize("is_new", [True, False])
def test_a_full_disk_is_a_failure_after_which_it_can_be_tried_again(is_new: bool, tmp_path: Path, store: Path) -> None:
    project = f"full-{is_new}"
    if not is_new:
        assert ran("export", store, "--to", "trackio", "--project", project).code == 0
    with RolloutStore.writer(tmp_path / "large") as writer:
        for step in range(40):
            for seed in range(8):
                writer.add(played(1.0, seed, answer="x" * 10_000), run="large", source="training", step=step)
    with no_room(3_000_000):
        done = ran("export", tmp_path / "large", "--to", "trackio", "--project", project)
    assert done.code == 1
    assert f"trackio's database in {TRACKIO_DIR} cannot be written" in done.words
    assert not [*(Path(TRACKIO_DIR) / "traces" / project).rglob("large*")]
    assert SQLiteStorage.get_project_db_path(project).exists() != is_new
    if not is_new:  # a database that is full cannot delete either
        assert "contains a partial export that could not be deleted: delete its runs ['large']" in done.words
        [left] = [run for run in trackio.Api().runs(project) if run.name == "large"]
        assert left.delete()
        assert sorted(run.name for run in trackio.Api().runs(project)) == ["random", "the-run"]
    assert ran("export", tmp_path / "large", "--to", "trackio", "--project", project).code == 0
    assert len(found(project, "large")[1]) == 320


def test_ctrl_c_leaves_nothing_behind(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = SQLiteStorage.bulk_log, []

    def interrupted(**kwargs: Any) -> None:
        calls.append(kwargs["steps"])
        if len(calls) == 3:
            raise KeyboardInterrupt
        write(**kwargs)

    monkeypatch.setattr(SQLiteStorage, "bulk_log", interrupted)
    command = ("export", store, "--to", "trackio", "--project", "interrupted")
    assert ran(*command)[::2] == (1, "error: stopped\n")
    assert not SQLiteStorage.get_project_db_path("interrupted").exists()
    assert ran(*command, "--where", "agent=random").code == 0
    calls.clear()
    assert ran(*command, "--where", "run=the-run")[::2] == (1, "error: stopped\n")
    assert [run.name for run in trackio.Api().runs("interrupted")] == ["random"]
    assert ran(*command, "--where", "run=the-run").code == 0


def test_nothing_is_sent(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError(f"a connection to {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/something")  # where trackio's own runs would go
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9/?write_token=x")
    assert ran("export", store, "--to", "trackio", "--project", "sent-nowhere").code == 0
    assert len(trackio.Api().runs("sent-nowhere")) == 2


def test_without_trackio_the_extra_is_named(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    done = ran("export", store, "--to", "trackio", "--project", "p")
    assert done.code == 1
    assert "pip install 'agentsgym[trackio]'" in done.words


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--to", "trackio"], "it requires --project NAME and no --output"),
        (["--to", "trackio", "--project", ""], "it requires --project NAME and no --output"),
        (["--to", "trackio", "--project", "p", "-o", "file"], "it requires --project NAME and no --output"),
        (["--to", "trackio", "--project", "p_traces"], "Choose a different project name"),
        (
            ["--to", "trackio", "--project", "p", "--min-reward", "1"],
            "--min-reward is only valid with --to sft or --to kto",
        ),
        (["--to", "jsonl"], "--to jsonl requires --output FILE"),
        (["--to", "jsonl", "-o", "file", "--run", "r"], "--project and --run are only valid with --to trackio"),
    ],
)
def test_what_does_not_go_together_is_refused(options: list[str], said: str, store: Path) -> None:
    done = ran("export", store, *options)
    assert done.code == 2
    assert said in done.words
