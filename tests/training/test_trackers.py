"""What trackers and the terminal get: real runs of trackio and tensorboard, and trackers that fail."""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trackio
from games import logged, settings, tasks, trainer_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio.sqlite_storage import SQLiteStorage
from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, TrackioCallback

from agentsgym import ConfigError, GRPOEnvTrainer, StopReason, Trajectory
from agentsgym.observers.shown import COLUMNS, Conversation, send_conversations
from agentsgym.training.metrics.registry import GROUPS, metric_of
from agentsgym.training.trackers import choose_metrics


class Watching(TrainerCallback):
    """A callback of one's own, which sees all."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def groups_of(keys: Any) -> set[str]:
    """The groups of keys, however a tracker has changed their beginnings."""
    plain = [key.replace("eval/", "eval_", 1).removeprefix("train/") for key in keys]
    return {metric.group for key in plain if (metric := metric_of(key))}


# trackio


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[GRPOEnvTrainer, list[Any], list[Any]]:
    """A run that trackio has followed: its trainer, what was logged, and its traces, as trackio gives them back."""
    project = "a-run"
    trainer = trainer_of(
        tmp_path_factory.mktemp("run"),
        report_to=["trackio"],
        project=project,
        run_name="first",
        log_conversations=2,
        eval_dataset=tasks(4),
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    [run] = trackio.Api().runs(project)
    assert run.name == "first"
    logs = SQLiteStorage.get_logs(project, run.name)
    return trainer, logs, SQLiteStorage.get_traces(project, run=run.name, sort="step_asc")


def test_trackio_has_every_metric_of_every_group(tracked: tuple[GRPOEnvTrainer, list[Any], list[Any]]) -> None:
    trainer, logs, _ = tracked
    for step, wanted in ((1, trainer.state.log_history[0]), (2, trainer.state.log_history[1])):
        [found] = [one for one in logs if one.get("train/global_step") == step and "train/loss" in one]
        assert {key: found[f"train/{key}"] for key in wanted if key != "step"} == {
            key: value for key, value in wanted.items() if key != "step"
        }
    assert {"summary", "stops", "lengths", "by_turn", "credit", "loss"} == groups_of(logs[-1] | found)
    assert any("eval/win_rate_low" in one for one in logs)


def test_trackio_has_the_conversations_as_a_table(tracked: tuple[GRPOEnvTrainer, list[Any], list[Any]]) -> None:
    trainer, logs, _ = tracked
    tables = [(one["train/global_step"], one["train/conversations"]) for one in logs if "train/conversations" in one]
    assert [step for step, _ in tables] == [1, 2]
    for step, table in tables:
        assert table["_type"] == trackio.Table.TYPE
        rows = table["_value"]
        assert [set(row) for row in rows] == [set(COLUMNS)] * 2
        assert rows[0]["reward"] >= rows[1]["reward"]
        assert {row["step"] for row in rows} == {step}
        assert all(
            "[user] Guess a number from one to six.\n[assistant, turn 0, reward" in row["conversation"] for row in rows
        )
    assert sum("eval/conversations" in one for one in logs) == 1
    for log in trainer.state.log_history:
        assert not {key for key in log if "conversation" in key or "rollouts/" in key}


def test_trackio_has_the_rollouts_as_traces(tracked: tuple[GRPOEnvTrainer, list[Any], list[Any]]) -> None:
    _, _, traces = tracked
    assert sorted(one["key"] for one in traces) == ["eval/rollouts"] * 2 + ["train/rollouts"] * 4
    for trace in traces:
        metadata = trace["metadata"]
        answers = [one for one in trace["messages"] if one["role"] == "assistant"]
        assert len(answers) == metadata["num_turns"] == len(metadata["turn_rewards"])
        assert sum(metadata["turn_rewards"]) == pytest.approx(metadata["reward"])
        assert metadata["outcome"] == ("won" if metadata["turn_rewards"][-1] == 1.0 else "lost")
        assert (metadata["status"], metadata["environment"]) == ("ok", "GuessNumber")
        advantages = metadata["turn_advantages"]
        assert advantages is None if trace["key"].startswith("eval") else len(advantages) == metadata["num_turns"]
    groups = [(one["metadata"]["task_index"], one["metadata"]["rollout_index"]) for one in traces]
    assert set(groups) <= {(task, rollout) for task in range(4) for rollout in range(4)}


def test_nothing_is_shown_unless_it_is_requested(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    project = "quiet"
    trainer_of(tmp_path, report_to=["trackio"], project=project, max_steps=1).train()
    assert SQLiteStorage.get_traces(project, run=next(iter(trackio.Api().runs(project))).name) == []
    assert "[assistant" not in capfd.readouterr().out


# tensorboard


def test_tensorboard_gets_the_groups_that_are_chosen(tmp_path: Path) -> None:
    watching = Watching()
    trainer = trainer_of(
        tmp_path,
        report_to=["tensorboard"],
        log_metrics=["summary", "by_turn"],
        callbacks=[watching],
        eval_dataset=tasks(4),
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    [events] = tmp_path.rglob("events.out.tfevents.*")
    written = EventAccumulator(str(events))
    written.Reload()
    scalars = written.Tags()["scalars"]
    assert groups_of(scalars) == {"summary", "by_turn"}
    assert {"train/reward", "train/reward/turn_00", "train/loss", "eval/win_rate_low", "train/train_runtime"} <= {
        *scalars
    }
    rewards = [(event.step, event.value) for event in written.Scalars("train/reward")]
    history = [log for log in trainer.state.log_history if "reward" in log]
    assert rewards == [(log["step"], pytest.approx(log["reward"])) for log in history]
    assert {"stops", "lengths", "credit", "loss"} <= groups_of(history[0])  # which keeps everything
    assert watching.logs[0].keys() == history[0].keys() - {"step"}


# The terminal


@pytest.mark.parametrize(("chosen", "printed"), [("all", {"summary"}), (["stops", "loss"], {"stops", "loss"})])
def test_the_terminal_gets_what_a_person_reads(
    chosen: Any, printed: set[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for disable_tqdm in (True, False):  # printed, or beside the progress bar
        trainer_of(tmp_path, max_steps=1, log_metrics=chosen, disable_tqdm=disable_tqdm).train()
        shown = capfd.readouterr().out
        [line] = [
            one for one in shown.replace("\r", "\n").splitlines() if "'epoch'" in one and "train_loss" not in one
        ] or ["'"]
        keys = line.split("'")[1::4]
        if keys != [""]:
            assert groups_of(keys) - ({"summary"} if keys == ["epoch"] else set()) == printed
            assert len(keys) < 20


def test_conversations_are_printed_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer_of(tmp_path, max_steps=1, log_conversations=3).train()
    shown = capfd.readouterr().out
    assert "training, step 1:" in shown
    assert shown.count("[user]\n") + shown.count("[user] ") >= 3
    assert shown.count("╭─ task ") == 3
    assert "[assistant, turn 0, reward " in shown


# wandb, which is not installed here: what is called is what its manual documents


class WandbTable:
    """wandb.Table, as documented: rows as long as the columns, of numbers and texts."""

    def __init__(self, *, columns: list[str], data: list[list[Any]]) -> None:
        assert all(len(row) == len(columns) for row in data)
        assert all(isinstance(cell, str | int | float) for row in data for cell in row)
        self.columns, self.data = columns, data


def test_wandb_is_given_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = ModuleType("wandb")
    logged: list[dict[str, Any]] = []
    wandb.Table, wandb.log = WandbTable, logged.append
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    messages: Any = [{"role": "user", "content": "Go."}]
    game = Trajectory(token_ids=[], turns=[], messages=messages, final_reward=0.5, stop_reason=StopReason.DONE)
    send_conversations("wandb", [Conversation.of(game)], kind="train", step=3)
    [entry] = logged
    assert entry["train/global_step"] == 3
    assert entry["train/conversations"].columns == [*COLUMNS]
    assert entry["train/conversations"].data[0][-1] == "[user] Go."
    send_conversations("tensorboard", [Conversation.of(game)], kind="train", step=3)  # it has no tables
    assert len(logged) == 1


# Trackers that fail


class Failing(TrackioCallback):
    """trackio, were its server down whenever something is logged."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        raise ConnectionError("the server is \x1b[2J down")


class NeverBegins(TrackioCallback):
    """One that cannot even begin."""

    num_tries = 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        type(self).num_tries += 1
        raise ConnectionError("the server is \x1b[2J down")

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("it was asked again")


@pytest.mark.parametrize(
    ("kind", "message"), [(Failing, "may miss some of the logged data"), (NeverBegins, "gets no more data of this run")]
)
def test_a_tracker_that_fails_costs_nothing_else(
    kind: type[TrackioCallback],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "trackio", kind)
    given = ["trackio", "tensorboard"]
    options = {"eval_dataset": tasks(2), "project": kind.__name__, "log_conversations": 1, "log_completions": True}
    trainer = trainer_of(tmp_path, report_to=given, **options)
    with caplog.at_level(logging.WARNING, "agentsgym"):
        trainer.train()
        trainer.evaluate()
    assert (trainer.state.global_step, given) == (2, ["trackio", "tensorboard"])
    assert NeverBegins.num_tries <= 1
    warnings = [one.getMessage() for one in caplog.records if "training continues" in one.getMessage()]
    assert warnings == [f"the tracker trackio failed (the server is \\x1b[2J down) and {message}; training continues"]
    assert [*tmp_path.rglob("events.out.tfevents.*")]


def test_a_tracker_that_dies_in_the_middle_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL hands trackers the times of its methods itself, past the callback."""
    log, calls = trackio.log, iter(range(1000))

    def dying(*args: Any, **kwargs: Any) -> None:
        if next(calls) > 3:
            raise BrokenPipeError("the service is \x1b[2J gone")
        log(*args, **kwargs)

    monkeypatch.setattr(trackio, "log", dying)
    trainer = trainer_of(tmp_path, report_to=["trackio", "tensorboard"], project="dying", log_conversations=1)
    with caplog.at_level(logging.WARNING, "agentsgym"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert len(logged(trainer, "reward")) == 2
    output = [one.getMessage() for one in caplog.records if "training continues" in one.getMessage()]
    assert (
        "the tracker trackio failed (the service is \\x1b[2J gone) and may miss some timings; training continues"
        in output
    )
    assert len(output) == len(set(output)) <= 3  # of times, of metrics, of conversations


def test_an_evaluation_before_the_training_is_tracked_too(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, report_to=["trackio"], project="before", run_name="r", eval_dataset=tasks(2))
    trainer.evaluate()  # TRL logs times to trackio before the first metric is logged
    trainer.train()
    logs = SQLiteStorage.get_logs("before", "r")
    assert len(trackio.Api().runs("before")) == 1
    assert sum("eval/win_rate" in one for one in logs) == 1
    assert sum("train/win_rate" in one for one in logs) == 2


@pytest.mark.parametrize(
    ("name", "reason"), [("trackio", "no space left"), ("wandb", "import of wandb halted; None in sys.modules")]
)
def test_where_conversations_cannot_be_sent_is_named_once(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(trackio, "Table", refuse)
    monkeypatch.setitem(sys.modules, "wandb", None)
    trainer = trainer_of(tmp_path, report_to=["trackio"], project="unsent", log_conversations=1)
    trainer.args.report_to = ["trackio", name] if name != "trackio" else ["trackio"]
    with caplog.at_level(logging.WARNING, "agentsgym"):
        trainer.train()
    output = [one.getMessage() for one in caplog.records if name in one.getMessage()]
    assert output == [f"conversations cannot be shown in {name}: {reason}; training continues"]


def test_a_tracker_does_not_stop_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(TrackioCallback):
        def __init__(self) -> None:
            pass

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "trackio", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, report_to=["trackio"]).train()


# Settings


@pytest.mark.parametrize("value", ["all", ["all"], None, "by_turn", ["summary", "loss"], ("summary",)])
def test_groups_may_be_given_in_any_form(value: Any, tmp_path: Path) -> None:
    args = settings(tmp_path, log_metrics=value)
    names = [value or "all"] if value is None or isinstance(value, str) else [*value]
    assert args.tracked_groups == (set(GROUPS) if names == ["all"] else set(names))
    assert args.printed_groups == ({"summary"} if names == ["all"] else set(names))
    args.to_json_string()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_metrics": ["by_turns"]}, "log_metrics has the unknown group 'by_turns'; did you mean 'by_turn'"),
        ({"log_metrics": "sumary"}, "did you mean 'summary'"),
        ({"log_metrics": ["all", "loss"]}, "log_metrics must be either 'all' or names of groups"),
        ({"log_metrics": []}, "log_metrics must be 'all' or a list of names"),
        ({"log_metrics": [1]}, "log_metrics must be 'all' or a list of names"),
        ({"log_conversations": -1}, "log_conversations must be a non-negative int"),
        ({"log_conversations": True}, "log_conversations must be a non-negative int"),
    ],
)
def test_what_is_no_setting_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, **changes)


def test_metrics_of_no_group_are_always_shown() -> None:
    metrics = {"train_runtime": 1.0, "mine/anything": 2, "reward": 0.5, "eval_reward/turn_00": 1.0, "kl": 0.1}
    assert choose_metrics(metrics, {"by_turn"}) == {
        "train_runtime": 1.0,
        "mine/anything": 2,
        "eval_reward/turn_00": 1.0,
    }
    assert choose_metrics(metrics, GROUPS) == metrics


def test_nothing_of_it_is_sent_over_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError(f"a connection to {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    trainer_of(tmp_path, report_to=["trackio"], project="alone", log_conversations=1, max_steps=1).train()
    assert len(trackio.Api().runs("alone")) == 1
