"""Stored rollouts as Inspect logs: what is written is read back by inspect_ai itself."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from stored import rollout, stored
from tool_functions import Calls, add, call, divide

from agentsgym import evaluate
from agentsgym.envs.Tools import ToolEnv
from agentsgym.errors import ConfigError, MissingDependencyError, StoreError
from agentsgym.export.inspect_logs import write_inspect_logs
from agentsgym.store.reader import RolloutStore
from agentsgym.store.records import StoredRollout
from agentsgym.types import Message, StopReason, Turn

pytest.importorskip("inspect_ai")

from inspect_ai.analysis import evals_df, samples_df
from inspect_ai.log import EvalLog, list_eval_logs, read_eval_log, read_eval_log_sample


def kept(path: Path, *records: StoredRollout) -> RolloutStore:
    with RolloutStore.writer(path) as writer:
        for record in records:
            writer.add_record(record)
    return RolloutStore(path)


def written(store: RolloutStore, path: Path) -> EvalLog:
    [file] = write_inspect_logs(store, path)
    return read_eval_log(str(file), resolve_attachments=True)


def talk(*said: tuple[str, str], **fields: Any) -> Any:
    """A rollout of a conversation, every answer a turn that is paid 1."""
    messages: list[Message] = [{"role": role, "content": content} for role, content in said]
    turns = [
        Turn(start=0, stop=0, reward=1.0, message_index=index)
        for index, (role, _) in enumerate(said)
        if role == "assistant"
    ]
    return rollout(0, **({"token_ids": [], "logprobs": None, "turns": turns, "messages": messages} | fields))


@pytest.mark.parametrize("suffix", [".eval", ".json"])
def test_conversation_calls_results_and_scores_come_back(tmp_path: Path, suffix: str) -> None:
    env = ToolEnv(tools=[add, divide])
    tasks = [{"question": "2 + 3?", "answer": 5}, {"question": "1 + 1?", "answer": 2}]
    agent = Calls([call("add", "first", a=2, b=3)], "5")
    evaluation = evaluate(env, agent, tasks, 2, store=tmp_path / "store", agent_name="lab/caller")
    log = written(RolloutStore(tmp_path / "store"), tmp_path / f"log{suffix}")

    assert (log.status, log.eval.task, log.eval.model) == ("success", "Tools", "lab/caller")
    assert (log.eval.dataset.samples, log.eval.config.epochs) == (2, 2)
    assert log.samples is not None
    assert [(one.id, one.epoch) for one in log.samples] == [(0, 1), (1, 1), (0, 2), (1, 2)]
    sample = read_eval_log_sample(str(tmp_path / f"log{suffix}"), 0, 2)
    [own] = [one for one in evaluation.trajectories if (one.task_index, one.rollout_index) == (0, 1)]
    assert [(one.role, one.text) for one in sample.messages] == [(one["role"], one["content"]) for one in own.messages]
    called, result = (one for one in sample.messages if one.role == "tool" or getattr(one, "tool_calls", None))
    [same] = called.tool_calls
    assert (same.id, same.function, same.arguments) == ("first", "add", {"a": 2, "b": 3})
    assert (result.tool_call_id, result.function, result.text) == ("first", "add", "5")
    assert [one.text for one in sample.input] == [own.messages[0]["content"]]
    assert sample.scores["success"].value == "C"
    assert sample.scores["reward"].value == own.final_reward
    assert sample.scores["turns"].value == own.num_turns == 2
    assert sample.metadata["task_data"] == {**own.task_data}
    assert sample.metadata["turn_rewards"] == own.turn_rewards
    assert sample.output.completion == "5"
    assert [one.metadata["reward"] for one in sample.messages if one.role == "assistant"] == own.turn_rewards

    assert log.results is not None
    scores = {one.name: one for one in log.results.scores}
    estimates = {"success": evaluation.win_rate, "reward": evaluation.reward, "turns": evaluation.turns}
    for name, estimate in estimates.items():
        mean, low, high = (one.value for one in scores[name].metrics.values())
        assert estimate is not None
        assert (mean, low, high) == (estimate.mean, estimate.low, estimate.high)


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # inspect_ai's own use of pandas
def test_the_tables_of_inspect_read_it(tmp_path: Path) -> None:
    store = kept(
        tmp_path / "store",
        *(
            StoredRollout(trajectory=talk(("user", "?"), ("assistant", "!"), task_index=index, info={"success": won}))
            for index, won in enumerate([True, False, True, None])
        ),
    )
    write_inspect_logs(store, tmp_path / "logs")
    [info] = list_eval_logs(str(tmp_path / "logs"))
    evals, samples = (table(info.name, quiet=True) for table in (evals_df, samples_df))
    assert evals["score_success_accuracy"].tolist() == [0.5]  # what is not known is not won
    assert sorted(samples["score_success"].tolist()) == ["C", "C", "I", "N"]
    assert samples["message_count"].tolist() == [2] * 4


def test_each_environment_agent_and_run_gets_a_log(tmp_path: Path) -> None:
    for name, config in (("a", {"size": 1}), ("b", {"size": 1}), ("b", {"size": 2})):
        stored(tmp_path / "store", [0, 1], agent=name, env_class_path="games.Guess", env_config=config)
    store = RolloutStore(tmp_path / "store")
    with pytest.raises(ConfigError, match=r"several \(Guess \(a\); Guess \(b\); Guess \(b\)\): use a folder"):
        write_inspect_logs(store, tmp_path / "log.eval")
    files = write_inspect_logs(store, tmp_path / "logs")
    assert [file.name for file in files] == ["Guess_a.eval", "Guess_b.eval", "Guess_b_2.eval"]
    logs = [read_eval_log(str(file)) for file in files]
    assert [(one.eval.model, one.eval.task_args) for one in logs] == [
        ("a", {"size": 1}),
        ("b", {"size": 1}),
        ("b", {"size": 2}),
    ]
    assert len({(one.eval.task_id, one.eval.eval_id) for one in logs}) == 3
    write_inspect_logs(store.filter(agent="a"), tmp_path / "log.eval")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["log.eval", "logs", "store"]


def test_hostile_text_is_text(tmp_path: Path) -> None:
    texts = [
        "<script>alert(1)</script>",
        "\x1b[31mred\x1b[0m\x00\u202eback",
        "a" * 1_000_000,
        "attachment://0123456789abcdef0123456789abcdef",
        "data:image/png;base64," + "A" * 500,
    ]
    said = [("user", texts[0]), *(("assistant", text) for text in texts), ("alien", "half \ud800 of a pair")]
    hostile = talk(
        *said,
        info={"ratio": math.nan, "big": 2**70, "\udfff": object(), "deep": {"x": [math.inf]}},
        task_data={"seed": 1, "text": texts[0]},
    )
    log = written(kept(tmp_path / "store", StoredRollout(trajectory=hostile, agent="\ud800/x")), tmp_path / "log.eval")
    assert log.samples is not None
    [sample] = log.samples
    assert [one.text for one in sample.messages[:-1]] == [texts[0], *texts]
    last = sample.messages[-1]
    assert (last.role, last.text, last.metadata) == ("user", "half \\ud800 of a pair", {"role": "alien"})
    assert (sample.metadata["info"]["ratio"], sample.metadata["info"]["big"]) == (None, 2**70)
    assert log.eval.model == "\\ud800/x"


def test_thoughts_limits_usage_and_advantages(tmp_path: Path) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "b"},
    ]
    turns = [Turn(start=2, stop=4, reward=0.5, message_index=1), Turn(start=5, stop=7, reward=1.0, message_index=3)]
    turns[1] = replace(turns[1], parent=0)
    own = rollout(0, 7, turns=turns, messages=messages, stop_reason=StopReason.MAX_TURNS)
    record = StoredRollout(trajectory=own, agent="m", step=3, advantages=[0, 0, 1, 3, 0, -1, -2])
    log = written(kept(tmp_path / "store", record), tmp_path / "log.eval")
    assert log.samples is not None
    [sample] = log.samples
    answers = [one for one in sample.messages if one.role == "assistant"]
    assert [one.metadata for one in answers] == [
        {"turn": 0, "reward": 0.5, "advantage": 2.0},
        {"turn": 1, "reward": 1.0, "parent": 0, "advantage": -1.5},
    ]
    assert [one.type for one in answers[0].content] == ["reasoning", "text"]
    assert sample.limit is not None
    assert (sample.limit.type, sample.limit.limit) == ("turn", 2)
    assert sample.metadata["step"] == 3
    usage = log.stats.model_usage["m"]
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (2 + 5, 4, 11)


def test_a_failed_rollout_has_an_error_and_no_scores(tmp_path: Path) -> None:
    failed = talk(
        ("user", "?"),
        stop_reason=StopReason.FAILED,
        error="in turn 0 of the game:\n  trace\x1b[31m\nValueError: no such move",
    )
    fine = talk(("user", "?"), ("assistant", "!"), task_index=1, final_reward=2.0)
    records = [StoredRollout(trajectory=one) for one in (failed, fine)]
    log = written(kept(tmp_path / "store", *records), tmp_path / "log.eval")
    assert log.samples is not None
    first, second = log.samples
    assert first.error is not None
    assert first.error.message == "in turn 0 of the game: ValueError: no such move"
    assert "\x1b" not in first.error.traceback_ansi
    assert (first.scores, second.error) == (None, None)
    assert log.results is not None
    assert (log.results.total_samples, log.results.completed_samples) == (2, 1)
    assert log.results.scores[0].metrics["mean"].value == 2.0


def test_no_sample_takes_the_place_of_another(tmp_path: Path) -> None:
    def one(**fields: Any) -> StoredRollout:
        columns = {name: fields.pop(name) for name in ("generation", "group") if name in fields}
        return StoredRollout(trajectory=talk(("user", "?"), **fields), **columns)

    again = one(task_data={"seed": 1})
    records = [
        again,
        replace(again, created_at=datetime.now(UTC)),  # as where a failed rollout is played again
        one(task_data={"seed": 1}, rollout_index=1),
        one(task_data={"seed": 2}),  # another task, of another evaluation
        one(generation=1, group=0),
        one(generation=2, group=0),
    ]
    log = written(kept(tmp_path / "store", *records), tmp_path / "log.eval")
    assert log.samples is not None
    assert sorted((str(sample.id), sample.epoch) for sample in log.samples) == [
        ("0", 1),
        ("0", 2),
        ("0-again-2", 1),
        ("0-other-2", 1),
        ("batch-1-task-0", 1),
        ("batch-2-task-0", 1),
    ]
    assert log.eval.dataset.samples == 4


def test_the_rollouts_of_a_task_group_are_epochs_of_one_sample(tmp_path: Path) -> None:
    """A trainer plays each rollout of a group as a task of its own, whose index is the row's."""
    talks = [talk(("user", "?"), task_data={"seed": index // 2}, task_index=index) for index in range(4)]
    training = [
        StoredRollout(trajectory=one, source="training", run="x", generation=3, group=index // 2, step=index)
        for index, one in enumerate(talks)
    ]
    evaluations = [
        StoredRollout(trajectory=one, source="evaluation", run="x", group=index // 2, step=step)
        for step in (2, 4)
        for index, one in enumerate(talks)
    ]
    store = kept(tmp_path / "store", *training, *evaluations)
    files = write_inspect_logs(store, tmp_path / "logs")
    assert [file.name for file in files] == ["unknown_x.eval", "unknown_x_step-2.eval", "unknown_x_step-4.eval"]
    logs = [read_eval_log(str(file)) for file in files]
    names = (("batch-3-task-0", "batch-3-task-1"), (0, 1), (0, 1))
    for log, (first, second), step in zip(logs, names, (None, 2, 4), strict=True):
        assert log.samples is not None
        found = sorted((str(sample.id), sample.epoch) for sample in log.samples)
        assert found == [(str(name), epoch) for name in (first, second) for epoch in (1, 2)]
        assert (log.eval.dataset.samples, log.eval.config.epochs) == (2, 2)
        assert (log.eval.metadata or {}).get("step") == step
    assert len({log.eval.eval_id for log in logs}) == 3


def test_a_large_store_becomes_several_logs(tmp_path: Path) -> None:
    store = stored(tmp_path / "store", range(5), agent="m")
    with pytest.raises(ConfigError, match="in parts of 2 samples at most"):
        write_inspect_logs(store, tmp_path / "log.eval", max_samples=2)
    files = write_inspect_logs(store, tmp_path / "logs", max_samples=2)
    logs = [read_eval_log(str(file)) for file in files]
    assert [len(log.samples or ()) for log in logs] == [2, 2, 1]
    assert [(log.eval.metadata or {})["part"] for log in logs] == [1, 2, 3]
    assert len({log.eval.eval_id for log in logs}) == 3
    assert sorted(one.name for one in tmp_path.iterdir()) == ["logs", "store"]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    store = stored(tmp_path / "store", range(3))
    (tmp_path / "there").mkdir()
    for place, said in (
        ("there", "already exists"),
        ("x.txt", "FILE.eval, FILE.json or a folder"),
        ("no/x.eval", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=said):
            write_inspect_logs(store, tmp_path / place)
    with pytest.raises(ConfigError, match="has no rollouts to write"):
        write_inspect_logs(store[:0], tmp_path / "x.eval")
    stored(tmp_path / "store", [7], agent="z")
    both = RolloutStore(tmp_path / "store")
    [part] = [one for one in (tmp_path / "store").glob("*.parquet") if len(RolloutStore(tmp_path / "store")) == 4][-1:]
    part.unlink()
    with pytest.raises(StoreError):
        write_inspect_logs(both, tmp_path / "logs")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["store", "there"]


def test_without_inspect_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored(tmp_path / "store", [0])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'agentsgym\[inspect\]'"):
        write_inspect_logs(store, tmp_path / "x.eval")
