"""What the command line keeps in a store, goes on with, checks and exports."""

from __future__ import annotations

import errno
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import GAME, Ran, game_file, ran, shell
from http_server import Asked, Reply, chat, serving

from agentsgym import RolloutStore, StopReason, Trajectory, Turn
from agentsgym.cli.stores import COLUMNS
from agentsgym.export import dpo_examples, kto_examples, sft_examples
from agentsgym.removed import REMOVED
from agentsgym.store import writer
from agentsgym.store.records import StoredRollout
from agentsgym.store.schema import SCALARS


@pytest.fixture
def game(tmp_path: Path) -> str:
    return game_file(tmp_path, "guess_of_stores")


def tasks_of(path: Path, secrets: Sequence[int]) -> tuple[str, Path]:
    path.write_text(json.dumps([{"secret": secret, "seed": index} for index, secret in enumerate(secrets)]))
    return "--tasks", path


def script(path: Path, *actions: str) -> str:
    path.write_text(json.dumps(actions))
    return f"scripted:{path}"


def results(done: Ran, index: int = 0) -> dict[str, Any]:
    return done.json["agents"][index]


def evaluated(game: str, tmp_path: Path, secrets: Sequence[int] = (1, 2, 3, 3)) -> Path:
    """The store of an evaluation: guesses 1, 2 and 3, at most two of them are made, so 3 is never guessed."""
    agent = script(tmp_path / "script.json", "1", "2", "3")
    tasks = tasks_of(tmp_path / "tasks.json", secrets)
    config = ("-c", "max_steps_per_episode=2")
    done = ran("eval", game, "-a", agent, *tasks, *config, "--store", tmp_path / "store", "--no-references")
    assert done.code == 0
    return tmp_path / "store"


# eval


def test_every_game_of_every_player_is_kept(game: str, tmp_path: Path) -> None:
    agent = script(tmp_path / "script.json", "1", "2", "3", "4")
    tasks = tasks_of(tmp_path / "tasks.json", [1, 2, 3])
    done = ran("eval", game, "-a", agent, *tasks, "-k", "2", "--store", tmp_path / "store", "--json")
    store = RolloutStore(tmp_path / "store")
    by_agent = {name: store.filter(agent=name) for name in (agent, "random")}
    assert {name: len(rollouts) for name, rollouts in by_agent.items()} == {agent: 6, "random": 3}
    rewards = [one.final_reward for one in by_agent[agent]]
    assert sum(rewards) / len(rewards) == results(done)["results"]["mean_reward"]
    assert {one.source for one in store.records()} == {"evaluation"}


def test_games_that_a_full_disk_does_not_keep_are_a_failure_that_is_reported_once(
    game: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    agent = script(tmp_path / "script.json", "1", "2", "3", "4")
    command = ("eval", game, "-a", agent, *tasks_of(tmp_path / "tasks.json", [1, 2, 3]), "--store", tmp_path / "store")
    with monkeypatch.context() as context:
        context.setattr(writer, "write_part", full)
        done = ran(*command)
    assert done.code == 1
    assert "win rate" in done.words
    assert "3 rollouts cannot be written to" in done.words
    assert done.words.count("No space left on device") == 2  # as it happens, and as the reason of the failure
    assert ran(*command, "--resume").code == 0


def test_a_server_that_was_down_is_called_again_for_what_is_missing(game: str, tmp_path: Path) -> None:
    def answer(requested: Asked) -> Reply:
        return Reply({"error": {"message": "no"}}, status=400) if 4 <= requested.number < 6 else chat("3")

    tasks = tasks_of(tmp_path / "tasks.json", [3] * 8)
    with serving(answer) as served:
        command = ("eval", game, "-a", "openai:gpt", "--base-url", served.url, *tasks, "--max-concurrent", "1")
        options = ("--store", tmp_path / "store", "--no-references", "--json")
        first = ran(*command, *options)
        assert first.code == 1
        assert "run the same command with --resume to continue" in first.words
        stopped = ran(*command, *options, "--resume")
        done = ran(*command, *options, "--resume")
    assert results(first)["results"]["num_episodes"] == 4
    found = results(stopped)  # what is known counts, also where the rest ends early again
    assert (found["num_resumed"], found["results"]["num_episodes"], found["results"]["num_failed"]) == (4, 4, 1)
    assert "1 of 8 rollouts failed" in found["ended_by"]
    assert done.code == 0
    assert "openai:gpt: 4 of 8 episodes were read from the store" in done.words
    found = results(done)
    assert (found["num_resumed"], found["results"]["num_episodes"], found["results"]["num_failed"]) == (4, 8, 0)
    assert len(served.requested) == 10
    again = ran(*command, *options, "--resume")  # there is nothing to play
    assert results(again)["results"] == found["results"]


def test_no_key_in_an_address_reaches_a_store_or_a_message(game: str, tmp_path: Path) -> None:
    def answer(requested: Asked) -> Reply:
        output = f"no {requested.path} for {requested.headers.get('authorization')}"
        return chat("3") if requested.number < 4 else Reply({"error": {"message": output}}, status=400)

    tasks = tasks_of(tmp_path / "tasks.json", [3] * 5)
    with serving(answer) as served:
        url = f"{served.url.replace('://', '://me:PW-of-mine@')}?api-key=S-of-mine"
        command = ("eval", game, "-a", "openai:gpt", "--base-url", url, *tasks, "--max-concurrent", "1")
        done = ran(*command, "--store", tmp_path / "store", "--no-references", "--max-failed", "1")
    (stored,) = {record.agent for record in RolloutStore(tmp_path / "store").records()}
    assert stored == f"openai:gpt --base-url {served.url}"
    files = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert not any(b"of-mine" in content for content in files)
    assert "of-mine" not in done.words


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_evaluation_that_was_ended_goes_on(tmp_path: Path, sent: signal.Signals) -> None:
    num_games, stop_after = 700, 400
    wait = (
        "        if task_data.get('index', 0) >= STOP_AFTER:\n"
        "            open('stopped', 'w').close()\n"
        "            __import__('time').sleep(600)\n"
        "        secret ="
    )
    (tmp_path / "waiting.py").write_text(
        GAME.replace('("secret",)', '("secret", "index")')
        .replace("        secret =", wait)
        .replace(
            "class Guess", f"STOP_AFTER = int(__import__('os').environ.get('STOP_AFTER', {num_games}))\n\n\nclass Guess"
        )
    )
    tasks = [{"secret": 1 + index % 4, "seed": index, "index": index} for index in range(num_games)]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    (tmp_path / "script.txt").write_text("1\n2\n3\n4\n")
    command = ("eval", "waiting.py", "-a", "scripted:script.txt", "--tasks", "tasks.json", "-n", str(num_games))
    options = ("--max-concurrent", "8", "--no-references", "--json")
    process = shell(*command, *options, "--store", "store", cwd=tmp_path, STOP_AFTER=str(stop_after))
    deadline = time.monotonic() + 60
    while not ((tmp_path / "stopped").exists() and [*(tmp_path / "store").glob("*.parquet")]):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(sent)
    process.communicate(timeout=60)
    num_kept = len(RolloutStore(tmp_path / "store"))
    assert 256 <= num_kept <= stop_after
    if sent != signal.SIGKILL:
        assert num_kept > stop_after - 8  # everything that was finished

    resumed = shell(*command, *options, "--store", "store", "--resume", cwd=tmp_path)
    out, err = resumed.communicate(timeout=60)
    assert resumed.returncode == 0, err
    [found] = json.loads(out)["agents"]
    assert (found["num_resumed"], found["num_planned"]) == (num_kept, num_games)
    kept = [one.task_data["index"] for one in RolloutStore(tmp_path / "store")]
    assert sorted(kept) == [*range(num_games)]  # none is lost, and none is there twice
    fresh, _ = shell(*command, *options, cwd=tmp_path).communicate(timeout=60)
    assert json.loads(fresh)["agents"][0]["results"] == found["results"]


def test_an_agent_that_goes_on_does_not_draw_again_what_it_drew(game: str, tmp_path: Path) -> None:
    common = ("eval", game, "-a", "random", "-c", "max_steps_per_episode=1", "--store", tmp_path / "store", "--resume")
    tasks = tasks_of(tmp_path / "tasks.json", [3] * 30)
    ran(*common, *tasks)
    done = ran(*common, *tasks, "-k", "2", "--json")
    assert results(done)["num_resumed"] == 30
    output = {
        (one.rollout_index, one.task_index): one.messages[-1]["content"] for one in RolloutStore(tmp_path / "store")
    }
    assert [output[0, index] for index in range(30)] != [output[1, index] for index in range(30)]


def test_what_a_killed_process_left_is_named_once(game: str, tmp_path: Path) -> None:
    path = evaluated(game, tmp_path)
    (path / "part.parquet.unfinished").write_bytes(b"PAR1")
    done = ran("eval", game, "-a", "random", "-n", "3", "--store", path, "--resume")
    assert done.code == 0
    assert done.words.count("part.parquet.unfinished") == 1


def test_other_settings_are_another_agent(game: str, tmp_path: Path) -> None:
    common = ("eval", game, "-a", "random", "--store", tmp_path / "store", "--resume", "--json")
    tasks = tasks_of(tmp_path / "tasks.json", [3] * 5)
    ran(*common, *tasks)
    assert results(ran(*common, *tasks, "--seed", "1"))["num_resumed"] == 0
    assert results(ran(*common, *tasks, "--seed", "1"))["num_resumed"] == 5
    assert len(RolloutStore(tmp_path / "store").filter(agent="random --seed 1")) == 5


def test_where_nothing_can_be_kept_nothing_is_played(game: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in (("eval", game, "-a", "random"), ("play", game, "-a", "random")):
        done = ran(*command, "--store", tmp_path / "file")
        assert done.code == 2
        assert "cannot create a rollout store at" in done.words
    done = ran("eval", game, "-a", "random", "--resume")
    assert done.code == 2
    assert "--resume requires --store PATH" in done.words


# play


def test_a_game_that_a_person_ends_is_kept_and_one_that_is_left_is_not(game: str, tmp_path: Path) -> None:
    options = (*tasks_of(tmp_path / "tasks.json", [3]), "--store", tmp_path / "store")
    assert ran("play", game, *options, typed="1\n3\n").code == 0
    left = ran("play", game, *options, typed="1\n")
    assert left.code == 0
    assert "The episode was not stored" in left.words
    [record] = RolloutStore(tmp_path / "store").records()
    assert (record.source, record.agent, record.env_class_path) == ("play", "person", "guess_of_stores.Guess")
    assert record.trajectory.turn_rewards == [0.0, 1.0]
    assert record.trajectory.task_data == {"secret": 3, "seed": 0}


def test_a_watched_game_that_fails_is_kept(game: str, tmp_path: Path) -> None:
    agent = script(tmp_path / "script.json", "9")
    assert ran("play", game, "-a", agent, "--store", tmp_path / "store").code == 1
    [record] = RolloutStore(tmp_path / "store").records()
    assert record.agent == agent
    assert record.trajectory.failed


# check


def tiny_store(tmp_path: Path) -> Path:
    """A store of rollouts with tokens, of an environment that is known everywhere."""
    config = ("-c", 'objects=["clock","cat"]', "-c", "max_steps_per_episode=2", "--dataset", "split=all")
    options = ("-n", "4", "--max-turn-tokens", "4", "--no-references", "--store", tmp_path / "store")
    assert ran("eval", "TwentyQuestions", *config, "-a", "policy:tiny", *options).code == 0
    return tmp_path / "store"


def test_an_audit_finds_what_is_wrong_in_its_place(tmp_path: Path) -> None:
    path = tiny_store(tmp_path)
    done = ran("check", path)
    assert done.code == 0
    assert "no problems" in done.words
    record = RolloutStore(path).record(1)
    trajectory = record.trajectory
    wrong = [0.25] * len(trajectory.token_ids)
    with RolloutStore.writer(path) as writer:  # rewards on all tokens, and an id that is none
        writer.add_record(replace(record, trajectory=replace(trajectory, per_token_rewards=wrong)))
        writer.add_record(replace(record, trajectory=replace(trajectory, token_ids=[-1] * len(trajectory.token_ids))))
    done = ran("check", path, "--json")
    assert done.code == 1
    problems = {(one["trajectory"], one["check"]) for one in done.json["problems"]}
    assert {one for one in problems if one[1] == "token_ids"} == {(5, "token_ids")}
    assert (4, "rewards") in problems
    assert {index for index, _ in problems} == {4, 5}
    assert (done.json["num_trajectories"], done.json["ok"]) == (6, False)


def test_rewards_of_an_unknown_environment_are_not_compared(game: str, tmp_path: Path) -> None:
    done = ran("check", evaluated(game, tmp_path), "--where", "success=true")
    assert done.code == 0
    assert "2 trajectories" in done.words
    assert "guess_of_stores.Guess is not a known environment" in done.words


def test_an_audit_of_a_store_with_a_cut_file_fails(game: str, tmp_path: Path) -> None:
    path = evaluated(game, tmp_path)
    [part] = path.glob("*.parquet")
    (path / f"{part.stem}-cut.parquet").write_bytes(part.read_bytes()[:-20])
    done = ran("check", path)
    assert done.code == 1
    assert "1 of 2 parquet files cannot be read and are skipped" in done.words


def test_a_damaged_file_is_a_failure(game: str, tmp_path: Path) -> None:
    path = evaluated(game, tmp_path)
    [part] = path.glob("*.parquet")
    data = bytearray(part.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    part.write_bytes(data)
    for command in (("check", path), ("export", path, "--to", "jsonl", "-o", tmp_path / "out.jsonl")):
        done = ran(*command)
        assert done.code == 1
        assert f"{part} can no longer be read" in done.words
        assert "move it out of the folder to read the other files" in done.words
        assert "cannot be written" not in done.words
    assert not (tmp_path / "out.jsonl").exists()


# export and --where


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_whole_rollouts_come_back_from_their_export(game: str, tmp_path: Path) -> None:
    path, out = evaluated(game, tmp_path), tmp_path / "out.jsonl"
    done = ran("export", path, "--to", "jsonl", "--output", out, "--where", "success=false", "--where", "num_turns>=2")
    assert done.code == 0
    assert "wrote 2 rollouts of 2 rollouts" in done.words
    copy = RolloutStore.from_jsonl(out, tmp_path / "copy")
    assert [*copy] == [*RolloutStore(path).filter(success=False)]
    again = ran("export", path, "--to", "jsonl", "--output", out)
    assert again.code == 2
    assert "already exists" in again.words
    assert len(lines_of(out)) == 2


def test_what_was_won_becomes_examples_that_trl_reads(game: str, tmp_path: Path) -> None:
    from datasets import load_dataset  # noqa: PLC0415
    from trl.data_utils import is_conversational  # noqa: PLC0415

    path = evaluated(game, tmp_path)
    for to in ("sft", "kto"):
        assert ran("export", path, "--to", to, "-o", tmp_path / f"{to}.jsonl").code == 0
    rows = lines_of(tmp_path / "sft.jsonl")
    assert [[one["content"] for one in row["messages"]] for row in rows] == [
        ["Guess: 1 to 4.", "1"],
        ["Guess: 1 to 4.", "1", "No.", "2"],
    ]
    loaded = load_dataset("json", data_files=str(tmp_path / "sft.jsonl"), cache_dir=str(tmp_path / "c"), split="train")
    assert all(is_conversational(row) for row in loaded)
    rows = lines_of(tmp_path / "kto.jsonl")
    assert [row["label"] for row in rows] == [True, True, True, False, False, False, False]
    assert all([one["role"] for one in row["completion"]] == ["assistant"] for row in rows)


def test_a_pair_is_where_two_rollouts_of_a_task_first_differ(game: str, tmp_path: Path) -> None:
    tasks = tasks_of(tmp_path / "tasks.json", [3])
    for number, actions in enumerate((["1", "2"], ["1", "3"])):
        agent = script(tmp_path / f"{number}.json", *actions)
        config = ("-c", "max_steps_per_episode=2", "--store", tmp_path / "store", "--no-references")
        ran("eval", game, "-a", agent, *tasks, *config)
    assert ran("export", tmp_path / "store", "--to", "dpo", "-o", tmp_path / "dpo.jsonl").code == 0
    [row] = lines_of(tmp_path / "dpo.jsonl")
    assert [one["content"] for one in row["prompt"]] == ["Guess: 1 to 4.", "1", "No."]
    assert [row[name][0]["content"] for name in ("chosen", "rejected")] == ["3", "2"]


def reported(reward: float, *texts: str, **turn: Any) -> Trajectory:
    """A rollout of one answer, the last text."""
    messages = [{"role": "user", "content": text} for text in texts[:-1]]
    return Trajectory(
        token_ids=[],
        turns=[Turn(start=0, stop=0, reward=reward, message_index=len(messages), **turn)],
        messages=[*messages, {"role": "assistant", "content": texts[-1]}],
        final_reward=reward,
        stop_reason=StopReason.DONE,
        task_data={"seed": 1},
    )


def records(*rollouts: Trajectory, **columns: Any) -> list[StoredRollout]:
    return [StoredRollout(trajectory=one, **columns) for one in rollouts]


def test_a_rewritten_history_is_given_as_the_agent_saw_it() -> None:
    seen = [{"role": "user", "content": "in short: q"}]
    [row] = sft_examples(records(reported(1.0, "a long question", "yes", prompt_messages=seen)), min_reward=1.0)
    assert [one["content"] for one in row["messages"]] == ["in short: q", "yes"]


def test_rollouts_that_chance_led_apart_or_that_earned_as_much_are_no_pair() -> None:
    def pairs(*rollouts: Trajectory) -> int:
        return len([*dpo_examples(records(*rollouts))])

    assert pairs(reported(1.0, "q", "a"), reported(0.0, "q", "b")) == 1
    assert pairs(reported(1.0, "q", "a"), reported(0.0, "other", "b")) == 0
    assert pairs(reported(1.0, "q", "a"), reported(1.0, "q", "b")) == 0
    assert (
        pairs(reported(1.0, "q", "a"), reported(0.0, "q", "b"), reported(0.5, "q", "c")) == 1
    )  # the one between has no other
    assert pairs(reported(1.0, "q", "a"), replace(reported(0.0, "q", "b"), task_data={"seed": 2})) == 0


def self_play(*moves: str, gained: Sequence[float]) -> Trajectory:
    """A game in which one agent speaks for both roles in turns; ``given`` has what each role earned."""
    messages: list[Any] = []
    for move in moves:
        messages += [{"role": "user", "content": "move"}, {"role": "assistant", "content": move}]
    return replace(
        reported(gained[0], "q", "a"),
        messages=messages,
        turns=[Turn(start=0, stop=0, reward=0.0, message_index=2 * k + 1, role=k % 2) for k in range(len(moves))],
        final_rewards=dict(enumerate(gained)),
    )


def test_in_self_play_the_answers_of_the_loser_are_none_of_a_winner() -> None:
    lost, won = self_play("a", "b", gained=[-1.0, 1.0]), self_play("a", "c", gained=[1.0, -1.0])
    assert [row["label"] for row in kto_examples(records(lost), min_reward=1.0)] == [False, True]
    assert [row["label"] for row in kto_examples(records(replace(lost, info={"success": False})))] == [
        False
    ]  # of role 0
    assert [*sft_examples(records(lost, won), min_reward=1.0)] == []
    assert len([*sft_examples(records(self_play("a", "b", gained=[1.0, 1.0])), min_reward=1.0)]) == 1
    [pair] = dpo_examples(records(lost, won))
    assert [pair[name][0]["content"] for name in ("chosen", "rejected")] == ["b", "c"]  # of role 1, which won with b


def calling(reward: float, call_id: str, answer: str) -> Trajectory:
    """A rollout that calls a tool, and answers."""
    call = {"id": call_id, "type": "function", "function": {"name": "price", "arguments": {"good": "egg"}}}
    messages: list[Any] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": call_id},
        {"role": "assistant", "content": answer},
    ]
    turns = [Turn(start=0, stop=0, reward=reward, message_index=index) for index in (1, 3)]
    return replace(reported(reward, "q", "a"), messages=messages, turns=turns)


def test_ids_of_calls_lead_no_two_rollouts_apart() -> None:
    rollouts = calling(1.0, "call_x", "3"), calling(0.0, "call_y", "4")
    [pair] = dpo_examples(records(*rollouts))
    assert [pair[name][0]["content"] for name in ("chosen", "rejected")] == ["3", "4"]
    assert len(pair["prompt"]) == 3


def test_examples_have_the_schemas_of_the_tools_where_the_store_has_them() -> None:
    tools = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object", "properties": {}}}}]
    won, lost = calling(1.0, "call_x", "3"), calling(0.0, "call_y", "4")
    reported_of = records(won, lost, tools=tools)
    found = [*sft_examples(reported_of, 1.0), *kto_examples(reported_of, 1.0), *dpo_examples(reported_of)]
    assert len(found) == 1 + 4 + 1
    assert all(json.loads(one["tools"]) == tools for one in found)
    bare = records(won, lost)  # of a store of an earlier release
    assert not any("tools" in one for one in [*sft_examples(bare, 1.0), *kto_examples(bare, 1.0), *dpo_examples(bare)])
    assert [*dpo_examples([reported_of[0], bare[1]])] == []  # what the agent was called is not the same


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--to", "csv"], 2, "--to must be one of jsonl, sft, dpo, kto, got 'csv'"),
        (["--to", "dpo", "--min-reward", "1"], 2, "--min-reward is only valid with --to sft or --to kto"),
        (["--to", "jsonl", "--where", "reward=1"], 2, "--where: unknown column 'reward'; did you mean"),
        (["--to", "jsonl", "--where", "success"], 2, "--where must be COLUMN=VALUE"),
        (["--to", "jsonl", "--where", "success=yes"], 2, "--where success must be true, false or null, got 'yes'"),
        (["--to", "jsonl", "--where", "num_turns=two"], 2, "--where num_turns must be a number or null, got 'two'"),
        (["--to", "jsonl", "--where", "seed>null"], 2, "can only be compared with = and !="),
        (["--to", "jsonl", "--where", "agent=me"], 2, "none of the 4 rollouts in"),
        (["--to", "sft", "--min-reward", "9"], 1, "these rollouts contain no example"),
    ],
)
def test_what_cannot_be_exported_is_reported_and_leaves_no_file(
    game: str, tmp_path: Path, options: list[str], code: int, message: str
) -> None:
    done = ran("export", evaluated(game, tmp_path), *options, "-o", tmp_path / "out.jsonl")
    assert done.code == code
    assert message in done.words
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("options", [["--to", "inspect"], ["--to", "trackio"], ["--to", "trackio", "--project", "p"]])
def test_formats_that_were_removed_name_what_to_use(tmp_path: Path, options: list[str]) -> None:
    done = ran("export", tmp_path, *options)
    assert done.code == 2
    assert done.words == f"error: {REMOVED['export ' + options[1]]}"


def test_what_is_no_store_is_a_usage_error(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        for command in (("check", path), ("export", path, "--to", "jsonl", "-o", tmp_path / "out.jsonl")):
            assert ran(*command).code == 2
    assert "there is no rollout store at" in ran("check", tmp_path / "missing").words
    (tmp_path / "foreign.parquet").write_text("no parquet")
    done = ran("check", tmp_path)
    assert "none of its 1 parquet files can be read" in done.words


def test_where_knows_columns_that_a_store_has() -> None:
    assert set(COLUMNS) <= set(SCALARS)
