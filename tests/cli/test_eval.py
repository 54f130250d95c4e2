"""Evaluation, replay and comparison from the command line: the numbers, what is kept, and exit codes."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import GAME, game_file, ran, shell
from http_server import HANG_UP, Asked, Reply, chat, serving

from agentsgym import RandomAgent, ScriptedAgent, evaluate
from agentsgym.cli.agent_runs import Plan, run_agent
from agentsgym.cli.options import find_env
from agentsgym.cli.players import Player
from agentsgym.envs.players import anchors_of
from agentsgym.envs.TwentyQuestions import RandomPlayer, TwentyQuestionsEnv
from agentsgym.statistics.passing import pass_at_k_interval, pass_hat_k_interval

TWENTY = ("-c", 'objects=["clock","cat","car","tree"]', "-c", "max_steps_per_episode=5", "--dataset", "split=all")


@pytest.fixture
def game(tmp_path: Path) -> str:
    return game_file(tmp_path, "guess_of_eval")


def results(done: Any) -> dict[str, Any]:
    return {one["agent"]: one for one in done.json["agents"]}


def test_equal_seeds_give_equal_numbers(game: str) -> None:
    done = ran("eval", game, "--agent", "random", "-n", "20", "-k", "4", "--seed", "7", "--json")
    found = results(done)["random"]
    assert done.json["num_tasks"] == 20
    assert found["num_planned"] == found["results"]["num_episodes"] == 80
    again = ran("eval", game, "--agent", "random", "-n", "20", "-k", "4", "--seed", "7", "--json")
    assert again.out == done.out
    other = ran("eval", game, "--agent", "random", "-n", "20", "-k", "4", "--seed", "8", "--json")
    assert results(other)["random"]["results"] != found["results"]


def test_numbers_of_info_are_rows_of_the_table(tmp_path: Path) -> None:
    (tmp_path / "calls_of_eval.py").write_text(
        GAME.replace('{"success"', '{"calls": 2 + (action == "1"), "note": "x", "success"')
    )
    done = ran("eval", f"{tmp_path / 'calls_of_eval.py'}:Guess", "-a", "random", "-n", "10", "--json")
    found = results(done)["random"]["results"]
    assert 2 < found["info/calls"] < 3
    assert "info/note" not in found
    shown = ran("eval", f"{tmp_path / 'calls_of_eval.py'}:Guess", "-a", "random", "-n", "10")
    assert ["info/calls", f"{found['info/calls']:.2f}"] in [line.split() for line in shown.out.splitlines()]


def test_the_numbers_of_given_tasks_are_those_of_evaluate(game: str, tmp_path: Path) -> None:
    tasks = [{"secret": 1 + index % 4, "seed": index} for index in range(12)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(str(task).replace("'", '"') for task in tasks))
    options = ["--tasks", str(tmp_path / "tasks.jsonl"), "-k", "4", "-c", "max_steps_per_episode=2"]
    done = ran("eval", game, "-a", "random", *options, "--cluster-by", "secret", "--json")
    found = results(done)["random"]
    env = find_env(game, {"max_steps_per_episode": 2}).build()
    expected = evaluate(env, RandomAgent(["1", "2", "3", "4"], seed=0), tasks, 4, cluster_by="secret")
    assert found["results"] == expected.as_dict()
    clusters = [tasks[one.task_index]["secret"] for one in expected.trajectories]
    for name, estimate in (("pass@2", pass_at_k_interval), ("pass^4", pass_hat_k_interval)):
        wanted = estimate(expected.trajectories, int(name[5:]), clusters=clusters)
        assert found["passes"][name] == {"mean": wanted.mean, "interval": [wanted.low, wanted.high]}


def test_its_own_players_are_played_beside() -> None:
    done = ran("eval", "TwentyQuestions", *TWENTY, "-a", "random", "-n", "8", "--json")
    found = results(done)
    assert list(found) == ["random", "reference"]
    config = {"objects": ["clock", "cat", "car", "tree"], "max_steps_per_episode": 5}
    env = TwentyQuestionsEnv(env_config=config)
    rows = env.get_eval_dataset(split="all", size=8)
    assert found["random"]["results"] == evaluate(env, RandomPlayer(env), rows, references=anchors_of(env)).as_dict()
    assert found["random"]["known_rewards"]["exact"] is False
    alone = ran("eval", "TwentyQuestions", *TWENTY, "-a", "random", "-n", "8", "--json", "--no-references")
    assert list(results(alone)) == ["random"]


def test_what_is_known_exactly_stands_beside_and_is_not_played() -> None:
    game = ("TextArena:GuessTheNumber-v0", "-c", "max_steps_per_episode=4", "-a", "reference", "-n", "30")
    found = results(ran("eval", *game, "--json"))
    assert list(found) == ["reference"]
    known = {"random": 0.705, "optimal": 0.986, "exact": True}
    assert found["reference"]["known_rewards"] == pytest.approx(known, abs=1e-3)
    shown = ran("eval", *game, columns=60)
    assert "random*" in shown.out
    assert "of optimal" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 60


@pytest.mark.parametrize("columns", [60, 80])
def test_the_table_is_readable_in_any_width(game: str, columns: int) -> None:
    done = ran("eval", game, "-a", "random", "-n", "10", "-k", "2", columns=columns)
    assert done.code == 0
    assert max(map(len, done.out.splitlines())) <= columns
    for measure in ("win rate", "reward", "turns", "pass@2", "pass^2", "episodes"):
        assert measure in done.out
    assert "…" not in done.out


def test_a_policy_that_was_saved_plays(tmp_path: Path) -> None:
    from agentsgym.agents.policy.agent import PolicyAgent  # noqa: PLC0415
    from agentsgym.tiny import tiny_policy  # noqa: PLC0415

    config = {"objects": ["clock", "cat"], "properties": ["alive"], "max_steps_per_episode": 2, "system_prompt": ""}
    model, tokenizer = tiny_policy(TwentyQuestionsEnv(env_config=config))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = [f"--config={key}={value!r}".replace("'", '"') for key, value in config.items()]
    common = ("-n", "6", "--max-turn-tokens", "4", "--dataset", "split=all", "--json", "--no-references")
    done = ran("eval", "TwentyQuestions", *options, "-a", f"policy:{tmp_path}", *common)
    env = TwentyQuestionsEnv(tokenizer, config)
    agent = PolicyAgent(model, tokenizer, max_turn_tokens=4)
    expected = evaluate(env, agent, env.get_eval_dataset(split="all", size=6))
    assert results(done)[f"policy:{tmp_path}"]["results"] == expected.as_dict()
    tiny = ran("eval", "TwentyQuestions", *options, "-a", "policy:tiny", *common)
    assert results(tiny)["policy:tiny"]["results"] == expected.as_dict()  # made from the same words and seed


def test_a_server_that_goes_down_loses_nothing(game: str, tmp_path: Path) -> None:
    def answer(requested: Asked) -> Reply:
        return chat("3") if requested.number < 4 else Reply({"error": {"message": "no"}}, status=400)

    (tmp_path / "tasks.json").write_text(str([{"secret": 3}] * 8).replace("'", '"'))
    with serving(answer) as served:
        common = ("--base-url", served.url, "--tasks", tmp_path / "tasks.json", "--max-concurrent", "1")
        done = ran("eval", game, "-a", "openai:gpt", *common, "--json")
    assert done.code == 1
    found = results(done)["openai:gpt"]
    assert found["results"]["num_episodes"] == 4
    assert found["results"]["win_rate"] == 1.0
    assert found["results"]["num_failed"] == 1
    assert "1 of 8 rollouts failed, more than --max-failed 0.1 allows" in found["ended_by"]
    assert (
        "openai:gpt finished 5 of 8 episodes; the shortest episodes finish first, so these means are biased"
        in done.words
    )


def test_a_server_that_refuses_the_key_ends_it(game: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-abcdefgh-12345678")
    with serving(lambda requested: Reply({"error": {"message": "bad key"}}, status=401)) as served:
        done = ran("eval", game, "-a", "openai:gpt", "--base-url", served.url, "--api-key-env", "MY_KEY", "-n", "3")
        assert served.requested[0].headers["authorization"] == "Bearer sk-abcdefgh-12345678"
    assert done.code == 1
    assert "refuses every request" in done.words
    assert "check api_key (on the command line --api-key-env)" in done.words
    assert "sk-abcdefgh" not in done.words
    refused = ran("eval", game, "-a", "openai:gpt", "--base-url", served.url, "--api-key-env", "MY_KEI", "-n", "3")
    assert refused.code == 2
    assert "the environment variable 'MY_KEI' is not set" in refused.words


def test_a_share_of_failures_may_be_allowed(game: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.json").write_text(str([{"secret": 3}] * 4).replace("'", '"'))
    replies = [chat("3"), HANG_UP, chat("3"), chat("3")]
    with serving(lambda requested: Reply({}, status=400) if requested.number == 1 else replies[0]) as served:
        common = ("--base-url", served.url, "--tasks", tmp_path / "tasks.json", "--max-concurrent", "1")
        done = ran("eval", game, "-a", "openai:gpt", *common, "--max-failed", "0.5", "--no-references")
    assert done.code == 0
    assert "failed 1" in done.words


def test_a_script_that_is_too_short_fails_every_game(game: str, tmp_path: Path) -> None:
    (tmp_path / "script.txt").write_text("9\n")
    done = ran("eval", game, "-a", f"scripted:{tmp_path / 'script.txt'}", "-n", "3", "--max-failed", "1")
    assert done.code == 1
    assert "every episode failed" in done.words


@pytest.mark.parametrize(
    ("sent", "message", "code"), [(signal.SIGINT, "stopped by Ctrl-C", 1), (signal.SIGTERM, "stopped by SIGTERM", 143)]
)
def test_a_signal_shows_what_was_played(tmp_path: Path, sent: signal.Signals, message: str, code: int) -> None:
    slow = "        __import__('time').sleep(0.01)\n        open('begun', 'a').write('.')\n        won ="
    (tmp_path / "guess.py").write_text(GAME.replace("        won =", slow))
    process = shell("eval", "guess.py", "-a", "random", "-n", "5000", "--max-concurrent", "4", "--json", cwd=tmp_path)
    begun, deadline = tmp_path / "begun", time.monotonic() + 60
    while not (begun.exists() and begun.stat().st_size > 100) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert f"error: {message}" in err
    assert "Traceback" not in err
    [found] = json.loads(out)["agents"]
    assert found["ended_by"] == message
    assert 0 < found["results"]["num_episodes"] < found["num_planned"] == 5000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "eval requires an agent"),
        (["-a", "random", "--cluster-by", "sekret"], "--cluster-by: task 0 has no key 'sekret'"),
        (["-a", "random", "--base-url", "http://x"], "--base-url is only valid with openai:MODEL"),
        (
            ["-a", "random", "--temperature", "0.5"],
            "--temperature is only valid with policy:PATH-OR-NAME and openai:MODEL, got the",
        ),
        (
            ["-a", "random", "--max-turn-tokens", "5"],
            "--max-turn-tokens is only valid with policy:PATH-OR-NAME and openai:MODEL",
        ),
        (
            ["-a", "policy:tiny", "--api-key-env", "KEY"],
            "--api-key-env is only valid with openai:MODEL, got the agent 'policy:tiny'",
        ),
        (["-a", "reference"], "has no reference player"),
        (["-a", "random", "--split", "test"], "--split must be train or eval, got 'test'"),
        (["-a", "random", "--dataset", "size=3"], "has no dataset, hence no options"),
    ],
)
def test_what_cannot_be_evaluated_is_a_usage_error(game: str, options: list[str], message: str) -> None:
    done = ran("eval", game, *options)
    assert done.code == 2
    assert message in done.words


class _Stopping(RandomAgent):
    """Raises an exception derived from KeyboardInterrupt at its second request."""

    num_calls = 0

    def act(self, requests: Any) -> Any:
        self.num_calls += 1
        if self.num_calls > 1:
            raise type("Stopped", (KeyboardInterrupt,), {})
        return super().act(requests)


def test_an_interruption_of_a_derived_class_ends_a_run_like_ctrl_c() -> None:
    env = TwentyQuestionsEnv()
    player = Player(label="stopping", env=env, agent=_Stopping(["Is it alive?"]))
    run = run_agent(player, Plan(tasks=env.get_eval_dataset(size=2), max_concurrent=1))
    assert (run.ended_by, run.exit_code) == ("stopped by Ctrl-C", 1)


@pytest.fixture
def stored_game(tmp_path: Path) -> str:
    return game_file(tmp_path, "guess_stored")


@pytest.fixture
def store(stored_game: str, tmp_path: Path) -> Path:
    env = find_env(stored_game, {"max_steps_per_episode": 2}).build()
    tasks = [{"secret": 1 + seed % 4, "seed": seed} for seed in range(8)]
    evaluate(env, ScriptedAgent(["1", "2"]), tasks, store=tmp_path / "runs", agent_name="script")
    evaluate(env, RandomAgent(["3"]), tasks[:6], store=tmp_path / "runs", agent_name="threes")
    return tmp_path / "runs"


def test_replay_of_what_has_not_changed(stored_game: str, store: Path) -> None:
    done = ran("replay", store, "--env", stored_game)
    assert (done.code, done.out) == (0, "14 rollouts: 14 same, 0 different, 0 not replayed\n")
    few = ran("replay", store, "--env", stored_game, "--where", "agent=threes", "--limit", "4", "--json")
    assert few.json["counts"] == {"same": 4, "differs": 0, "impossible": 0}
    assert {one["agent"] for one in few.json["rollouts"]} == {"threes"}


def test_replay_of_a_changed_environment(stored_game: str, store: Path, tmp_path: Path) -> None:
    (tmp_path / "guess_changed.py").write_text(GAME.replace('"No."', '"No, not \\x1b[31mthat."'))
    sys.modules.pop("guess_changed", None)
    changed = f"{tmp_path / 'guess_changed.py'}:Guess"
    done = ran("replay", store, "--env", changed, "--where", "agent=script")
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[0].startswith("script, task 1, rollout 0, turn 1: the observation was 'No.' and is 'No, not ")
    assert "\x1b" not in done.out
    assert lines[-1] == "8 rollouts: 2 same, 6 different, 0 not replayed"
    assert "6 of 8 rollouts differ" in done.err
    found = ran("replay", store, "--env", changed, "--where", "agent=script", "--json")
    assert found.code == 1
    differences = [one["difference"] for one in found.json["rollouts"] if one["difference"]]
    assert {(one["turn"], one["what"]) for one in differences} == {(1, "observation")}


def test_replay_runs_no_code_that_a_store_names(store: Path) -> None:
    done = ran("replay", store)
    assert done.code == 1
    assert "14 cannot be replayed: env_class_path 'guess_stored.Guess' is not registered" in done.words
    assert "pass it with --env ENV" in done.words


def test_compare_two_agents_of_a_store(store: Path) -> None:
    options = ("--where-a", "agent=script", "--where-b", "agent=threes")
    done = ran("compare", store, *options, columns=100)
    assert done.code == 0
    assert done.out.startswith("6 shared tasks\n")
    assert 'tasks whose results differ: 4 worse, 1 better\nworse 1/1 -> 0/1, reward 1.00 -> 0.00: Guess {"s' in done.out
    assert "tasks only in A: 2, only in B: 0" in done.out
    found = ran("compare", store, store, *options, "--json").json
    assert found["win_rate"]["difference"] == pytest.approx(-0.5)
    assert [task["change"] for task in found["tasks"]] == [-1, -1, -1, -1, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("compare", "STORE"), "a run cannot be compared with itself"),
        (("compare", "STORE", "nowhere"), "nowhere"),
        (("compare", "STORE", "--where-a", "agent=nobody"), "none of the"),
        (("compare", "STORE", "--where-a", "agnet=script"), "did you mean 'agent'"),
        (("replay", "nowhere"), "nowhere"),
        (("replay", "STORE", "--where", "agent"), "must be COLUMN=VALUE"),
    ],
)
def test_what_there_is_not(store: Path, arguments: tuple[str, ...], sentence: str) -> None:
    done = ran(*(str(store) if one == "STORE" else one for one in arguments))
    assert done.code == 2
    assert sentence in done.words


def test_runs_without_a_shared_task_fail(store: Path) -> None:
    done = ran("compare", store, "--where", "agent=script", "--where-a", "seed=1", "--where-b", "seed=2")
    assert done.code == 1
    assert "share no task" in done.words
