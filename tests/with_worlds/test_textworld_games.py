"""TextWorldEnv with the real TextWorld: every kind of game is made, played, lost and won."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textworld")

from agentsgym import Agent, EnvProcessPool, EnvThreadPool, ScriptedAgent, check_env, evaluate, make
from agentsgym.envs import TextWorldEnv
from agentsgym.envs.players import imitation_player, random_player, reference_player
from agentsgym.envs.shared.engines import shared_processes
from agentsgym.envs.TextWorld.engine import TextWorldEngine, game_key
from agentsgym.envs.TextWorld.env import checked_game_options

COIN = {"kind": "coin_collector", "options": {"level": 3}}
COOKING = {"kind": "cooking", "options": {"recipe": 1, "take": 1, "cook": True}}
KINDS = {
    "custom": {"kind": "custom", "options": {"rooms": 2, "objects": 4, "quest_length": 2}},
    "parallel quests": {"options": {"rooms": 4, "objects": 8, "parallel_quests": 2}},
    "coin collector": COIN,
    "treasure hunter": {"kind": "treasure_hunter", "options": {"level": 12}},
    "cooking": COOKING,
    "cooking, all of it": {
        "kind": "cooking",
        "options": {"recipe": 2, "take": 2, "go": 6, "open": True, "cook": True, "cut": True, "drop": True},
    },
    "simple": {"kind": "simple", "options": {"rewards": "balanced", "goal": "brief"}},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("games")


@pytest.fixture
def engine() -> Iterator[TextWorldEngine]:
    made = TextWorldEngine()
    yield made
    made.close()


def made(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "options": checked_game_options(kind, options), "seed": 3}


def env_of(cache: Path, config: dict[str, Any], **more: Any) -> TextWorldEnv:
    return TextWorldEnv(env_config={**config, "cache_dir": str(cache), **more})


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rewards", [{}, {"reward": "win"}, {"progress_share": 0.5}, {"progress_share": 1.0}])
def test_the_walkthrough_wins_every_kind_and_is_rewarded_1(cache: Path, name: str, rewards: dict[str, Any]) -> None:
    env = env_of(cache, KINDS[name], **rewards)
    [played] = env.rollout([{"game_seed": 3}], reference_player(env))
    assert (played.error, played.success, str(played.stop_reason)) == (None, True, "done")
    assert played.final_reward == pytest.approx(1.0)
    if rewards == {"progress_share": 1.0} and "drop" not in KINDS[name].get("options", {}):
        assert sum(reward > 0 for reward in played.turn_rewards) > 1  # each step on the way is rewarded


def test_prompts_repeat_what_the_game_returns_and_what_can_be_done(cache: Path) -> None:
    [played] = env_of(cache, COIN).rollout([{"game_seed": 3}], ScriptedAgent(["look", "frobnicate", "take nothing"]))
    texts = [message["content"] for message in played.messages if message["role"] == "user"]
    assert "coin" in texts[0]
    assert texts[0].splitlines()[-1] == "Possible commands: go north, inventory, look"
    assert not any(mark in text for text in texts for mark in (">", "$", "|", "\n\n\n"))
    assert texts[2].startswith("That is no command here. The verbs are: drop, examine, go, inventory, look, take.")
    assert texts[3].startswith("You can't see any such thing.")
    [bare] = env_of(cache, COIN, admissible_commands=False).rollout([{"game_seed": 3}], ScriptedAgent(["look"]))
    assert "Possible commands" not in str(bare.messages)


@pytest.mark.parametrize("command", ["quit", "restart", "undo", "tw-trace-actions", "look. look", "<think>Hm", ""])
def test_the_interpreter_is_not_steered(cache: Path, command: str) -> None:
    env = env_of(cache, COIN, max_steps_per_episode=5)
    way = ["look", command, "look", "inventory"]
    [played] = env.rollout([{"game_seed": 3}], ScriptedAgent(way))
    texts = [message["content"] for message in played.messages if message["role"] == "user"]
    assert played.turns[1].invalid
    assert texts[1] == texts[3]  # the game is as it was
    assert not any(turn.invalid for turn in (played.turns[0], *played.turns[2:]))


def test_a_lost_game_is_over_and_keeps_what_it_had_earned(cache: Path) -> None:
    env = env_of(cache, COOKING)
    [won] = env.rollout([{"game_seed": 5}], reference_player(env))
    output = [message["content"] for message in won.messages if message["role"] == "assistant"]
    [take] = [command for command in output if command.startswith("take")]
    food = take.removeprefix("take ").partition(" from")[0]
    [lost] = env.rollout([{"game_seed": 5}], ScriptedAgent([take, f"eat {food}"]))
    assert (lost.success, str(lost.stop_reason), len(lost.turns)) == (False, "done", 2)
    assert lost.turn_rewards == [pytest.approx(won.turn_rewards[output.index(take)]), 0.0]
    [returned] = env_of(cache, COOKING, progress_share=1.0).rollout(
        [{"game_seed": 5}], ScriptedAgent([take, f"eat {food}"])
    )
    assert returned.final_reward == pytest.approx(0.0)  # progress that leads nowhere is taken back


def test_the_state_key_follows_the_world(engine: TextWorldEngine, cache: Path) -> None:
    start = engine.start({**made("coin_collector", {"level": 3}), "cache_dir": str(cache)})
    way, back = start["walkthrough"][0], {"east": "west", "west": "east", "north": "south", "south": "north"}
    there = engine.step(way)
    assert there["key"] != start["key"] == engine.step(f"go {back[way.split()[1]]}")["key"]
    assert engine.step("look")["key"] == start["key"]
    assert there["progress"] == pytest.approx(1 / 3)


def test_a_used_engine_plays_as_a_new_one(engine: TextWorldEngine, cache: Path) -> None:
    def played(one: TextWorldEngine, game: dict[str, Any]) -> list[dict[str, Any]]:
        first = one.start(game)
        return [first, *(one.step(command) for command in ["look", *first["walkthrough"]])]

    games = [
        {**made(kind, options), "cache_dir": str(cache)}
        for kind, options in (("coin_collector", {"level": 3}), ("cooking", COOKING["options"]))
    ]
    fresh = [played(TextWorldEngine(), game) for game in games]
    assert [played(engine, games[index]) for index in (0, 0, 1, 0, 1)] == [fresh[index] for index in (0, 0, 1, 0, 1)]


def test_a_game_is_the_same_wherever_it_is_made(cache: Path, tmp_path: Path) -> None:
    for folder in (cache, tmp_path, Path()):
        where = "" if folder == Path() else str(folder)
        one, two = (
            env.rollout([{"game_seed": 3}], reference_player(env))[0].messages
            for env in (env_of(cache, COOKING), TextWorldEnv(env_config={**COOKING, "cache_dir": where}))
        )
        assert one == two


def test_a_game_that_is_not_kept_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = TextWorldEngine()
    first = engine.start({**made("coin_collector", {"level": 2}), "cache_dir": ""})
    assert not list(tmp_path.iterdir())  # its process may be killed while it plays
    assert [engine.step(command)["won"] for command in first["walkthrough"]] == [False, True]


def test_a_game_that_the_compiler_does_not_take_is_reported_by_its_options(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = importlib.import_module("textworld.generator")

    def refuse(*_: Any) -> None:
        raise generator.CouldNotCompileGameError("\nProblem 7: too large.")

    monkeypatch.setattr(generator, "compile_game", refuse)
    with pytest.raises(ValueError, match=r"rejected the game of kind 'coin_collector'.*\{'level': 7\}: use options"):
        TextWorldEngine().start({**made("coin_collector", {"level": 7}), "cache_dir": str(cache)})


def test_an_interpreter_is_sent_nothing_that_ends_it(cache: Path) -> None:
    env = env_of(cache, COIN, max_steps_per_episode=4)
    [played] = env.rollout([{"game_seed": 3}], ScriptedAgent(["take \0x", "take 🍎 é", "take %n\x1b[A", "look"]))
    assert played.error is None
    assert [turn.invalid for turn in played.turns] == [True, True, True, False]


def test_a_damaged_game_is_made_anew(tmp_path: Path) -> None:
    env = env_of(tmp_path, COIN)
    assert env.rollout([{"game_seed": 4}], reference_player(env))[0].success
    folder = tmp_path / game_key("coin_collector", {"level": 3}, 4)
    assert sorted(path.name for path in folder.iterdir()) == ["game.json", "game.z8", "manifest.json"]
    other = env.rollout([{"game_seed": 5}], reference_player(env))[0]  # so that the engine has another game open
    whole = (folder / "game.z8").read_bytes()
    (folder / "game.z8").write_bytes(whole[:5000])
    assert other.success
    assert env.rollout([{"game_seed": 4}], reference_player(env))[0].success
    assert (folder / "game.z8").stat().st_size == len(whole)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_group_and_the_episodes_of_a_trial_play_one_game(cache: Path) -> None:
    env = env_of(cache, COIN, episodes_per_trial=2, keep_history=True)
    played = env.rollout([{"seed": 1}], reference_player(env), num_rollouts=2)
    assert [one.final_reward for one in played] == [2.0, 2.0]
    starts = [message["content"] for message in played[0].messages if message["content"].startswith("A new game")]
    assert starts[0] == starts[1]
    assert played[0].messages == played[1].messages


def test_games_in_files(cache: Path, tmp_path: Path) -> None:
    env = env_of(cache, COIN)
    for seed in (3, 4):
        env.rollout([{"game_seed": seed}], reference_player(env))
        kept = cache / game_key("coin_collector", {"level": 3}, seed)
        for suffix in (".z8", ".json"):
            shutil.copy(kept / f"game{suffix}", tmp_path / f"{seed}{suffix}")
    config = {"kind": "files"}
    train, held_out = (
        make_rows(config, files=str(tmp_path))
        for make_rows in (TextWorldEnv.get_train_dataset, TextWorldEnv.get_eval_dataset)
    )
    files = [row["task_data"]["file"] for rows in (train, held_out) for row in rows]
    assert sorted(files) == [str(tmp_path / "3.z8"), str(tmp_path / "4.z8")]
    env = make(train[0])
    assert env.rollout(train, reference_player(env))[0].success


def test_a_file_that_is_no_game_fails_its_own_episode(cache: Path, tmp_path: Path) -> None:
    for name, content in (("text.z8", b"no game"), ("cut.z8", b"\x08" + bytes(40)), ("empty.z8", b"")):
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).with_suffix(".json").write_text("{}")
    env = TextWorldEnv(env_config={"kind": "files"})
    played = env.rollout([{"file": str(path)} for path in sorted(tmp_path.glob("*.z8"))], ScriptedAgent(["look"]))
    assert all(one.failed for one in played)
    reported = [one.error or "" for one in played]
    assert "text.z8 must be a game for version 8 of the Z-machine" in reported[2]
    env = env_of(cache, COIN)
    assert env.rollout([{"game_seed": 3}], reference_player(env))[0].success


def test_it_keeps_the_contract(cache: Path) -> None:
    env = env_of(cache, COIN, max_steps_per_episode=6)
    report = check_env(env, [{"game_seed": 3, "seed": 1}, {"game_seed": 4, "seed": 2}], random_player(env))
    assert not report.findings


def test_threads_and_processes_play_the_same_episodes(cache: Path) -> None:
    env = env_of(cache, COIN, max_steps_per_episode=6, num_processes=2)
    tasks = [{"game_seed": 3 + index % 2, "seed": index} for index in range(6)]
    agent = ["look", "go east", "go west", "go north", "go south", "inventory"]
    expected = [one.messages for one in env.rollout(tasks, ScriptedAgent(agent))]
    with EnvThreadPool(4) as threads:
        assert [one.messages for one in env.rollout(tasks, ScriptedAgent(agent), pool=threads)] == expected
    with EnvProcessPool(2) as processes:
        assert [one.messages for one in env.rollout(tasks, ScriptedAgent(agent), pool=processes)] == expected


def test_a_crash_of_the_engine_costs_no_other_episode(cache: Path) -> None:
    env = env_of(cache, COIN, step_timeout_s=33.0)  # processes of its own
    keys = ("num_processes", "step_timeout_s", "start_timeout_s")
    processes = shared_processes(TextWorldEnv.engine, **{key: env.env_config[key] for key in keys})

    class Saboteur(Agent):
        """Ends the engine's process behind the environment's back, once, and then plays on."""

        def __init__(self) -> None:
            self.player, self.num = reference_player(env), 0

        def act(self, requests: Any) -> Any:
            self.num += 1
            if self.num == 2:
                processes.close()
            return self.player.act(requests)

    played = env.rollout([{"game_seed": 3, "seed": n} for n in range(4)], Saboteur())
    assert [one.success for one in played] == [True] * 4  # the games were replayed


def test_what_the_players_are_worth(cache: Path) -> None:
    env = env_of(cache, {"kind": "coin_collector", "options": {"level": 102}}, max_steps_per_episode=6)
    rows = [{"game_seed": seed, "seed": seed} for seed in range(3)]
    best = evaluate(env, reference_player(env), rows).win_rate.mean
    shown = evaluate(env, imitation_player(env), rows).win_rate.mean
    chance = evaluate(env, random_player(env), rows * 4).win_rate.mean
    assert best == 1.0 >= shown > chance
