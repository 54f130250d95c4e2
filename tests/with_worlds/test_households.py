"""Generated households in ALFWorld's own engine: every walkthrough wins, at its last command and not before."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentsgym.errors import ConfigError
from tools.households import SIZES, SPLITS, TASK_TYPES, GeneratedHouseholds, generate, generate_households
from tools.households.plans import TREATMENTS, Planner
from tools.households.rooms import LAMP
from tools.households.shipped import shipped

ONE_OF_EACH = dict.fromkeys(SPLITS, len(TASK_TYPES))


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    textworld, pddl = importlib.import_module("textworld"), importlib.import_module("textworld.envs.pddl")
    downward = importlib.import_module("fast_downward")
    wrapped = importlib.import_module("alfworld.agents.environment.alfred_tw_env")
    env = pddl.PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True, facts=True))
    yield wrapped.AlfredDemangler(env)
    downward.close_lib(env.downward_lib)


def played(engine: Any, game: Path) -> str:
    """Replay the walkthrough, check each step, and give the first observation."""
    engine.load(str(game))
    state = engine.reset()
    first = state.feedback
    commands = json.loads(game.read_text())["walkthrough"]
    for index, command in enumerate(commands):
        assert command in state.admissible_commands, (game, index, command)
        assert not state["won"], (game, index)
        state, score, done = engine.step(command)
        assert state.feedback != "Nothing happens.", (game, command)
    assert (score, done, state["won"]) == (1, True, True), game
    return first


# Medium games take the engine a second each: three seeds of the small ones, one of these.
@pytest.mark.parametrize(
    ("size", "seed"), [*((size, seed) for size in ("tiny", "small") for seed in (0, 1, 2)), ("medium", 0)]
)
def test_every_walkthrough_wins_with_its_last_command(tmp_path: Path, engine: Any, size: str, seed: int) -> None:
    made = generate_households(tmp_path, ONE_OF_EACH, seed=seed, size=size)
    for split in SPLITS:
        assert made.task_types[split] == dict.fromkeys(TASK_TYPES, 1)
        for game in made.games[split]:
            first = played(engine, game)
            sentence = json.loads((game.parent / "traj_data.json").read_text())["turk_annotations"]["anns"][0]
            assert f"Your task is to: {sentence['task_desc']}." in first
            low, high = SIZES[size].receptacles
            listed = first.split("you see ")[1].split("\n")[0].count(",") + 1
            assert low <= listed <= high


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_a_searching_walkthrough_wins_and_looks_nowhere_twice(tmp_path: Path, engine: Any, size: str) -> None:
    made = generate_households(tmp_path / "searching", {"train": 18}, seed=5, size=size, searching=True)
    straight = generate_households(tmp_path / "straight", {"train": 18}, seed=5, size=size)
    lengths: list[tuple[int, int]] = []
    for one, other in zip(made.games["train"], straight.games["train"], strict=True):
        played(engine, one)
        games = [json.loads(game.read_text()) for game in (one, other)]
        searched, direct = (game.pop("walkthrough") for game in games)
        assert games[0] == games[1]  # the games are the same
        opened = [command for command in searched if command.startswith("open ")]
        assert len(opened) == len(set(opened))
        lengths.append((len(searched), len(direct)))
    assert sum(searched for searched, _ in lengths) > sum(direct for _, direct in lengths)


def digest(made: GeneratedHouseholds) -> str:
    files = sorted(path for path in made.folder.rglob("*") if path.is_file())
    reported = [(str(path.relative_to(made.folder)), path.read_text()) for path in files]
    return hashlib.sha256(json.dumps(reported).encode()).hexdigest()


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    sizes = {"train": 12, "valid_unseen": 6}
    one, same = (digest(generate_households(tmp_path / name, sizes, seed=7)) for name in "ab")
    assert one == same
    assert digest(generate_households(tmp_path / "c", sizes, seed=8)) != one
    backwards = dict(reversed(sizes.items()))
    assert digest(generate_households(tmp_path / "d", backwards, seed=7)) == one


def test_a_larger_split_begins_with_the_games_of_a_smaller_one(tmp_path: Path) -> None:
    few = generate_households(tmp_path / "few", {"train": 10})
    many = generate_households(tmp_path / "many", {"train": 40})
    texts = [[game.read_text() for game in made.games["train"]] for made in (few, many)]
    assert texts[1][:10] == texts[0]


def kind(game: Path) -> tuple[str, ...]:
    """Task type, object and receptacle, as the folder states."""
    return tuple(game.parent.parent.name.split("-")[:4])


@pytest.mark.parametrize("size", SIZES)
def test_unseen_games_have_other_rooms_and_other_tasks(tmp_path: Path, size: str) -> None:
    num_games = {"train": 300, "valid_seen": 60, "valid_unseen": 60}
    made = generate_households(tmp_path, num_games, size=size, seed=3)
    kinds = {split: {kind(game) for game in made.games[split]} for split in SPLITS}
    numbers = {split: {int(game.parent.parent.name.split("-")[-1]) for game in made.games[split]} for split in SPLITS}
    assert not kinds["valid_unseen"] & (kinds["train"] | kinds["valid_seen"])
    assert all(1 <= number % 100 <= 6 for number in numbers["valid_unseen"])
    assert all(7 <= number % 100 <= 30 for number in numbers["train"] | numbers["valid_seen"])
    problems = [json.loads(game.read_text())["pddl_problem"] for split in SPLITS for game in made.games[split]]
    without_names = {problem.split("\n", 1)[1] for problem in problems}
    assert len(without_names) == sum(num_games.values())  # no two games are equal


def test_files_are_what_alfworld_itself_lists_and_plays(tmp_path: Path) -> None:
    made = generate_households(tmp_path, {"train": 12, "valid_seen": 6, "valid_unseen": 6}, size="tiny")
    data = tmp_path / "json_2.1.1"
    config = {
        "env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6]},
        "dataset": {
            "data_path": str(data / "train"),
            "eval_id_data_path": str(data / "valid_seen"),
            "eval_ood_data_path": str(data / "valid_unseen"),
            "num_train_games": -1,
            "num_eval_games": -1,
        },
    }
    module = importlib.import_module("alfworld.agents.environment.alfred_tw_env")
    for name, split in zip(("train", "eval_in_distribution", "eval_out_of_distribution"), SPLITS, strict=True):
        listed = module.AlfredTWEnv(config, train_eval=name).game_files
        assert sorted(map(Path, listed)) == sorted(made.games[split])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("unseen", [False, True])
def test_each_task_type_has_a_choice_of_tasks_in_every_size(size: str, unseen: bool) -> None:
    planner = Planner(shipped().rules, size, unseen=unseen)
    for task_type in TASK_TYPES:
        tasks = {task for _, tasks in planner.possible(task_type) for task in tasks}
        assert len(tasks) >= 2, (size, unseen, task_type)
        for task in tasks:
            assert (task.receptacle == LAMP) == (task_type == "look_at_obj_in_light")
            assert task.receptacle != TREATMENTS.get(task_type, ("", ""))[1]


def test_some_task_types_alone_are_dealt_out_in_turn(tmp_path: Path) -> None:
    types = ["pick_two_obj_and_place", "look_at_obj_in_light"]
    made = generate_households(tmp_path, {"train": 5}, task_types=types)
    assert made.task_types["train"] == {"pick_two_obj_and_place": 3, "look_at_obj_in_light": 2}
    assert [kind(game)[0] for game in made.games["train"]] == [types[n % 2] for n in range(5)]


def test_when_no_different_household_is_left_that_is_reported_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "_TRIES", 2)  # a thousand exhaust only what takes minutes
    with pytest.raises(ConfigError, match=r"no more different households of 'look_at_obj_in_light'.*larger size"):
        generate_households(tmp_path, {"valid_unseen": 20_000}, size="tiny", task_types=["look_at_obj_in_light"])
    assert not list(tmp_path.iterdir())
