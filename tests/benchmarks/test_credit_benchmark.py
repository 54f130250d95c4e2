"""The benchmark of credit: what its games are worth is exact, and what it states of runs is what they did."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from agentsgym import Agent, ConfigError, MultistepEnv, ScriptedAgent
from agentsgym.envs.TwentyQuestions import GreedyPlayer
from benchmarks import credit
from benchmarks.credit_games import HIGHER, LOWER, BlindPlayer, CoinMaze, GuessTheNumber, guess_values, read_maze
from benchmarks.credit_report import Run, first_crossing, median_over_seeds, read_runs, write_report
from benchmarks.credit_trap import AppleTree, apple_values

SQUARE = """
o-o-o
|   |
o-o o
"""


class TreePlayer(Agent):
    """Answers what a table holds for the answers heard so far."""

    def __init__(self, output: dict[tuple[str, ...], str]) -> None:
        self.said = output

    def get_action(self, messages: list[Any], agent_state: Any) -> tuple[str, Any]:
        heard = (*(agent_state or ()), messages[-1]["content"])
        return self.said[heard[1:]], heard


def reward_of(env: MultistepEnv, agent: Agent, tasks: list[dict[str, Any]]) -> float:
    return fmean(trajectory.final_reward for trajectory in env.rollout([{"seed": 0, **task} for task in tasks], agent))


def secrets(size: int) -> list[dict[str, Any]]:
    return [{"secrets": [number]} for number in range(1, size + 1)]


@pytest.mark.parametrize("scheme", ["win_plus_information", "find", "win"])
def test_no_strategy_guesses_better_than_the_best_and_one_as_well(scheme: str) -> None:
    env = GuessTheNumber(env_config={"size": 5, "guesses": 2, "reward_scheme": scheme})
    heard = [(), (HIGHER,), (LOWER,)]
    numbers = env.actions_of("")
    worths = [
        reward_of(env, TreePlayer(dict(zip(heard, output, strict=True))), secrets(5))
        for output in product(numbers, repeat=3)
    ]
    worth = guess_values(5, 2, rounds=1, reward_scheme=scheme)
    assert max(worths) == pytest.approx(worth["optimal_reward"], abs=1e-12)
    assert fmean(worths) == pytest.approx(worth["random_reward"], abs=1e-12)  # a random strategy is random play


@pytest.mark.parametrize("scheme", ["win_plus_information", "find", "win"])
def test_random_guesses_are_worth_what_all_sequences_of_them_are_on_average(scheme: str) -> None:
    config = {"size": 3, "guesses": 2, "rounds": 2, "reward_scheme": scheme}
    env = GuessTheNumber(env_config=config)
    tasks = [{"secrets": [first, second]} for first, second in product(range(1, 4), repeat=2)]
    worths = [reward_of(env, ScriptedAgent(output), tasks) for output in product(env.actions_of(""), repeat=4)]
    worth = guess_values(3, 2, rounds=2, reward_scheme=scheme)
    # Guesses that a round found early does not need are left over, and what is left over is as random.
    assert fmean(worths) == pytest.approx(worth["random_reward"], abs=1e-12)
    assert max(worths) <= worth["optimal_reward"]


def walks(env: CoinMaze, start: str, moves: int) -> list[tuple[float, list[str]]]:
    """Every walk from a room and its chance under random play."""
    found: list[tuple[float, list[str], str]] = [(1.0, [], start)]
    for _ in range(moves):
        found = [
            (chance / len(env.exits[room]), [*output, way], there)
            for chance, output, room in found
            for way, there in env.exits[room].items()
        ]
    return [(chance, output) for chance, output, _ in found]


@pytest.mark.parametrize("moves", [3, 7])
@pytest.mark.parametrize("scheme", ["coins", "win"])
def test_no_walk_is_better_than_the_best_and_random_walks_are_as_good_as_claimed(scheme: str, moves: int) -> None:
    env = CoinMaze(env_config={"maze": SQUARE, "max_steps_per_episode": moves, "reward_scheme": scheme})
    for start in ("a1", "b1", "c2"):
        played = [
            (chance, env.rollout([{"start": start, "seed": 0}], ScriptedAgent(output))[0])
            for chance, output in walks(env, start, moves)
        ]
        worth = played[0][1].info
        assert max(game.final_reward for _, game in played) == pytest.approx(worth["optimal_reward"], abs=1e-12)
        expected = math.fsum(chance * game.final_reward for chance, game in played)
        assert expected == pytest.approx(worth["random_reward"], abs=1e-12)


@pytest.mark.parametrize("name", credit.GAMES)
def test_random_play_scores_what_the_anchor_states(name: str) -> None:
    game = credit.GAMES[name]
    env: Any = game.make()
    texts = [text for text in env.vocabulary_texts() if text.startswith(("Is", "Does", "Can", "Has"))]

    def actions_of(observation: str) -> list[str]:
        return env.actions_of(observation) if hasattr(env, "actions_of") else texts

    games = env.rollout(game.tasks("test", 0, 1600), BlindPlayer(actions_of, seed=0))
    scores = [credit.score_of(info) for info in env.last_info.values()]
    assert len(scores) == len(games)
    anchors = env.anchors()
    assert abs(fmean(scores) - anchors["random_reward"]) < 4 * stdev(scores) / len(scores) ** 0.5
    assert anchors["optimal_reward"] == pytest.approx(1.0)


@pytest.mark.parametrize("turns", [1, 2, 5])
@pytest.mark.parametrize("scheme", ["apples", "win"])
def test_apples_are_worth_what_all_ways_to_pick_them_are(scheme: str, turns: int) -> None:
    env = AppleTree(env_config={"max_steps_per_episode": turns, "reward_scheme": scheme})
    ways = [[*output] for output in product(env.actions_of(""), repeat=turns)]
    worths = [reward_of(env, ScriptedAgent(output), [{}]) for output in ways]
    assert apple_values(turns, reward_scheme=scheme) == pytest.approx(
        {"optimal_reward": max(worths), "random_reward": fmean(worths)}, abs=1e-12
    )
    assert reward_of(env, ScriptedAgent(["wait"] * (turns - 1) + ["pick"]), [{}]) == 1.0


def test_a_tree_that_was_left_alone_bears_the_square_of_its_turns() -> None:
    [game] = AppleTree().rollout([{}], ScriptedAgent(["wait", "pick", "eat", "wait", "pick", "pick"]))
    assert [round(36 * reward) for reward in game.turn_rewards] == [0, 4, 0, 0, 9, 1]
    assert [turn.invalid for turn in game.turns] == [False, False, True, False, False, False]
    assert [message["content"] for message in game.messages if message["role"] == "user"][:3] == [
        "Turn 1 of 6: 1 apples.",
        "Turn 2 of 6: 4 apples.",
        "Turn 3 of 6: 1 apples.",
    ]


def test_best_play_wins_twenty_questions_whatever_the_secret_is() -> None:
    game = credit.GAMES["twenty_questions"]
    env: Any = game.make()
    tasks = [{"solution": secret, "seed": 0} for secret in game.secrets]
    assert all(won.success for won in env.rollout(tasks, GreedyPlayer(env)))


def test_what_best_play_needs_is_more_than_sixteen_turns_in_the_long_games() -> None:
    for name in ("rounds", "many_rounds", "maze"):
        assert credit.GAMES[name].make().env_config["max_steps_per_episode"] >= 16
    assert min(len(ways) for ways in CoinMaze().exits.values()) == 1  # dead ends
    assert len(CoinMaze().exits) - 1 == 15  # coins, one a move at most


def test_a_wall_and_a_word_that_is_no_direction_cost_a_turn() -> None:
    env = CoinMaze(env_config={"maze": "o-o", "max_steps_per_episode": 3})
    [game] = env.rollout([{"start": "a1", "seed": 0}], ScriptedAgent(["north", "jump", "east"]))
    assert game.turn_rewards == [0.0, 0.0, 1.0]
    assert [turn.invalid for turn in game.turns] == [False, True, False]
    assert game.success
    assert [message["content"] for message in game.messages if message["role"] == "user"] == ["a1: east."] * 3


def test_equal_rooms_and_coins_are_one_state_however_they_were_reached() -> None:
    env = CoinMaze(env_config={"maze": "o-o-o", "max_steps_per_episode": 4})
    [game] = env.rollout([{"start": "a1", "seed": 0}], ScriptedAgent(["east", "west", "east", "east"]))
    keys = [turn.state_key for turn in game.turns]
    assert keys[1] == keys[3]
    assert len(set(keys)) == 3


def test_a_round_ends_with_its_number_or_its_last_guess() -> None:
    env = GuessTheNumber(env_config={"size": 4, "guesses": 2, "rounds": 2})
    [game] = env.rollout([{"secrets": [3, 1], "seed": 0}], ScriptedAgent(["2", "4", "1"]))
    assert game.turn_rewards == [0.5, 0.5, 1.0]
    assert game.info["score"] == 0.5
    output = [message["content"] for message in game.messages if message["role"] == "user"]
    assert output == ["Guess a number from 1 to 4.", "Higher.", "Lower. Guess a number from 1 to 4."]
    with pytest.raises(ConfigError, match="room for rounds"):
        GuessTheNumber(env_config={"rounds": 6})


def test_a_drawing_is_read_as_it_looks() -> None:
    exits = read_maze(SQUARE)
    assert exits["a1"] == {"north": "a2", "east": "b1"}
    assert exits["c1"] == {"north": "c2"}
    with pytest.raises(ConfigError, match="way out of every room"):
        CoinMaze(env_config={"maze": "o o"})


def a_run(scores: list[float], **changes: Any) -> Run:
    values: dict[str, Any] = {
        "game": "maze",
        "arm": "grpo",
        "seed": 0,
        "batch_size": 128,
        "random_score": 0.0,
        "optimal_score": 0.5,
        "scores": scores,
        "final_score": 0.4,
        "final_win_rate": 0.2,
        "num_evaluated": 1024,
        "cpu_s": 1.0,
    }
    return Run(**(values | changes))


def test_episodes_are_counted_until_the_mean_of_the_last_ones_is_there() -> None:
    run = a_run([0.0, 0.25, 0.25, 0.5, 0.5])  # as fractions, over two batches: 0, .25, .5, .75, 1
    assert run.curve() == [(128, 0.0), (256, 0.25), (384, 0.5), (512, 0.75), (640, 1.0)]
    assert run.episodes_to(0.5) == 384
    assert run.episodes_to(0.8) == pytest.approx(512 + 128 * 0.2)
    assert math.isinf(a_run([0.0, 0.2]).episodes_to(0.5))
    assert first_crossing([(0, 0.0), (1, 1.0), (2, 0.0), (3, 2.0)], 1.0) == 1


def test_an_interval_over_seeds_holds_the_median_and_pairs_the_seeds() -> None:
    median = median_over_seeds([1.0, 2.0, 3.0, 4.0, math.inf])
    assert median.value == 3
    assert 1 <= median.low <= 3 <= median.high
    paired = median_over_seeds([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert paired == (2, 2, 2)


def test_what_was_not_reached_is_reported_to_be_so(tmp_path: Path) -> None:
    fast, slow = [0.5] * 8, [0.0] * 8
    runs = [a_run(fast, seed=seed, arm="gigpo") for seed in range(3)]
    runs += [a_run(fast if seed == 0 else slow, seed=seed) for seed in range(3)]
    report = write_report(runs, tmp_path)
    rows = {line.split("`")[1]: line for line in report.splitlines() if line.startswith("| `")}
    assert report.count("not reached (1 of 3)") == 1
    assert "| < 0.12 [0.12, 1.00] |" in rows["gigpo"]  # 128 episodes, over at least 1,024
    assert (tmp_path / "credit_maze.png").read_bytes().startswith(b"\x89PNG")


def test_the_overview_has_a_row_an_arm_and_a_column_a_game(tmp_path: Path) -> None:
    runs = [a_run([0.5] * 8), a_run([0.0] * 8, arm="gigpo"), replace(a_run([0.5] * 8), game="many_rounds")]
    header, _, *rows = write_report(runs, tmp_path).split("\n\n")[1].splitlines()
    assert header == "| arm | maze | many rounds |"
    assert rows == ["| `grpo` | 128 · 80% | 128 · 80% |", "| `gigpo` | never · 80% |  |"]


@pytest.fixture
def short_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    game = replace(credit.GAMES["guess"], num_demonstrations=64, warm_start_steps=40, num_episodes=64, num_evaluated=16)
    monkeypatch.setitem(credit.GAMES, "guess", game)  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("default")  # TRL and transformers warn for reasons of their own
@pytest.mark.usefixtures("short_guess")
def test_a_run_is_kept_and_not_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["credit", "--games", "guess", "--arms", "grpo", "--seeds", "0", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)
    credit.main()
    assert "guess grpo seed 0" in capsys.readouterr().out
    [run] = read_runs(tmp_path / "runs.jsonl")
    assert run.num_episodes == 64
    assert run.num_evaluated == 16
    credit.main()
    assert "seed" not in capsys.readouterr().out
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 1
    monkeypatch.setattr("sys.argv", [*command, "--report"])
    credit.main()
    assert "; 64 episodes, 1 or more seeds an arm." in capsys.readouterr().out


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("short_guess")
@pytest.mark.parametrize("changes", [{"num_updates": 4}, {"num_iterations": 2}])
def test_a_variant_plays_as_much_from_the_same_warm_start(
    changes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = replace(credit.GAMES["guess"], variant_of="guess", **changes)
    monkeypatch.setitem(credit.GAMES, "guess_otherwise", variant)  # pyright: ignore[reportArgumentType]
    run = credit.learn("guess_otherwise", "grpo", 0, tmp_path)
    assert (run.game, run.num_episodes, len(run.scores)) == ("guess_otherwise", 64, 2)
    assert [folder.name for folder in (tmp_path / "warm").iterdir()] == ["guess-0"]


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("short_guess")
@pytest.mark.parametrize("arm", ["win_grpo", "grpo"])
def test_the_arm_of_trl_has_trls_own_advantages(arm: str, tmp_path: Path) -> None:
    policy = credit.warm_start("guess", 0, tmp_path)
    trainer, env = credit.trainer_of(credit.GAMES["guess"], credit.ARMS[arm], 0, policy, num_episodes=64)
    batches: list[dict[str, torch.Tensor]] = []
    play: Callable[[Any], dict[str, torch.Tensor]] = trainer._generate_and_score_completions  # pyright: ignore[reportPrivateUsage]
    rewards: dict[str, float] = {}  # by session, in the order in which sessions began: that of the rows
    step = env._step_episode  # pyright: ignore[reportPrivateUsage]

    def watched_step(session_id: str, state: dict[str, Any], action: str) -> Any:
        result = step(session_id, state, action)
        rewards[session_id] = rewards.get(session_id, 0.0) + result[1]
        return result

    def watched_play(rows: Any) -> dict[str, torch.Tensor]:
        batches.append(play(rows))
        return batches[-1]

    trainer._generate_and_score_completions = watched_play  # type: ignore[method-assign]
    env._step_episode = watched_step  # type: ignore[method-assign]
    trainer.train()
    assert len(batches) == 2
    for index, batch in enumerate(batches):
        earned = torch.tensor([*rewards.values()][32 * index : 32 * (index + 1)]).view(-1, credit.NUM_ROLLOUTS)
        # As TRL writes it: rewards - mean_grouped_rewards, over std_grouped_rewards + 1e-4.
        expected = (earned - earned.mean(1, keepdim=True)) / (earned.std(1, keepdim=True) + 1e-4)
        mask = batch["agent_token_mask"].bool()
        assert expected.abs().max() > 0.5
        for row, number in enumerate(expected.flatten()):
            torch.testing.assert_close(
                batch["advantages"][row][mask[row]], number.expand(int(mask[row].sum())), atol=1e-4, rtol=1e-4
            )


def test_arms_of_one_reward_differ_in_the_credit_alone() -> None:
    assert credit.ARMS["win_grpo"] == credit.Arm(estimator="grpo", paid="win", scale="group", discount=1.0)
    for name, arm in credit.ARMS.items():
        assert name.startswith("win_") == (arm.paid == "win")
    assert json.dumps([dict(arm.settings) for arm in credit.ARMS.values()])
