"""What the agent reads, what it is given, and which settings are refused."""

from __future__ import annotations

from typing import Any

import nltk
import pytest

from agentsgym import ConfigError, ScriptedAgent, StopReason, TaskError, Trajectory, make
from agentsgym.envs import TextArenaEnv
from agentsgym.envs.TextArena import catalogue
from agentsgym.envs.TextArena.observations import NOTHING_NEW, text_of


def play(game: str, actions: list[str], seed: int = 1, **config: Any) -> Trajectory:
    env = TextArenaEnv(env_config={"game": game, **config})
    return env.rollout([{"seed": seed}], ScriptedAgent(actions, repeat_last=True))[0]


def secret(seed: int = 1, **config: Any) -> int:
    env = TextArenaEnv(env_config={"game": "GuessTheNumber-v0", **config})
    return env.start_session("a", {}, seed=seed)["game"].state.game_state["game_number"]


def test_each_message_is_what_is_new() -> None:
    number = secret()
    low = 1 if number != 1 else 2
    rollout = play("GuessTheNumber-v0", [f"[{low}]", f"[{number}]"])
    first, guess, hint, _ = [message["content"] for message in rollout.messages]
    assert first.startswith("You are Player 0. You are playing Guess The Number.")
    assert guess == f"[{low}]"
    assert hint == f"The target number is {'higher' if number > low else 'lower'}."


def test_a_win_is_rewarded_and_reported() -> None:
    rollout = play("GuessTheNumber-v0", [f"[{secret()}]"])
    assert (rollout.final_reward, rollout.success, rollout.stop_reason) == (1.0, True, StopReason.DONE)
    assert rollout.info["reason"].startswith("Congratulations")


def test_what_is_rewarded_for_progress_before_an_invalid_move_is_no_win() -> None:
    number = secret()
    rollout = play("GuessTheNumber-v0", [f"[{number - 1 or 2}]", "nonsense"])
    assert [turn.invalid for turn in rollout.turns] == [False, True, True]
    assert 0.9 < rollout.final_reward < 1.0
    assert rollout.success is False


def test_the_game_forgives_invalid_moves_in_a_row_as_many_as_wanted() -> None:
    assert play("GuessTheNumber-v0", ["x"], errors_in_a_row=3).num_turns == 4
    assert play("GuessTheNumber-v0", ["x"], errors_in_a_row=0).num_turns == 1


def test_a_valid_move_clears_the_games_count_and_not_the_episodes() -> None:
    number = secret()
    wrong = [n for n in range(1, 21) if n != number][:4]
    actions = ["x", f"[{wrong[0]}]", "x", f"[{wrong[1]}]", "x", f"[{number}]"]
    assert play("GuessTheNumber-v0", actions).success is True
    strict = play("GuessTheNumber-v0", actions, error_allowance=1)
    assert (strict.num_turns, strict.stop_reason) == (3, StopReason.DONE)  # the game itself ends it with a reward
    assert strict.info["reason"].startswith("Invalid Move")


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_limit_of_turns_is_the_games_own(limit: int) -> None:
    number = secret(max_steps_per_episode=limit)
    wrong = [f"[{n}]" for n in range(1, 21) if n != number]
    rollout = play("GuessTheNumber-v0", wrong, max_steps_per_episode=limit)
    assert (rollout.num_turns, rollout.stop_reason) == (limit, StopReason.DONE)
    assert f"within {limit} turns" in rollout.messages[0]["content"]
    assert "turn limit" in rollout.info["reason"]


def test_a_games_own_limit_is_never_raised() -> None:
    rollout = play("GuessTheNumber-v0", ["[1]"], max_steps_per_episode=1000)
    assert "within 10 turns" in rollout.messages[0]["content"]


def test_a_game_without_a_limit_is_cut_by_ours() -> None:
    rollout = play("TowerOfHanoi-v0", ["[A C]", "[C A]"] * 9, max_steps_per_episode=3)
    assert rollout.num_turns == 3
    rollout = play("2048-v0", ["[up]", "[left]", "[right]", "[down]"], max_steps_per_episode=2, errors_in_a_row=9)
    assert (rollout.num_turns, rollout.stop_reason, rollout.success) == (2, StopReason.MAX_TURNS, False)


def test_actions_without_brackets_get_them_as_wanted() -> None:
    number = str(secret())
    assert play("GuessTheNumber-v0", [number]).success is True
    assert play("GuessTheNumber-v0", [number], add_brackets=False).turns[0].invalid
    assert play("GuessTheNumber-v0", [f"I say [{number}]"]).success is True


def test_options_reach_the_game() -> None:
    rollout = play("GuessTheNumber-v0", ["[77]"], game_options={"max_number": 90})
    assert "between 1 and 90" in rollout.messages[0]["content"]


@pytest.mark.parametrize("suffix", ["", "-raw", "-train"])
def test_every_form_of_an_id_is_the_same_game(suffix: str) -> None:
    assert TextArenaEnv(env_config={"game": f"FrozenLake-v0{suffix}"}).game == "FrozenLake-v0"


@pytest.mark.parametrize("game", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0"])
def test_arguments_in_the_wrong_order_are_mended(game: str) -> None:
    rollout = play(game, ["[what]", "no"])
    assert rollout.error is None
    assert "You attempted an invalid move. Reason: " in rollout.messages[2]["content"]
    assert isinstance(rollout.final_reward, float)
    assert "Reason: 0" not in rollout.messages[2]["content"]


def test_games_of_words_need_no_download_and_share_their_dictionary() -> None:
    envs = [TextArenaEnv(env_config={"game": game}) for game in ("Wordle-v0", "Wordle-v0-hardcore", "SpellingBee-v0")]
    games = [env.start_session("a", {}, seed=1)["game"]._game for env in envs for _ in range(2)]
    assert len({id(game.dictionary) for game in games}) == 1
    rollout = play("Wordle-v0", ["[crane]", "[qqqqq]"])
    assert "C R A N E" in rollout.messages[2]["content"]
    assert "'qqqqq' is not an English word" in rollout.messages[4]["content"]


@pytest.mark.parametrize("game", ["Wordle-v0", "Hangman-v0", "WordLadder-v0", "DontSayIt-v0-unlimited", "Codenames-v0"])
def test_playing_leaves_the_words_that_games_share_as_they_are(game: str) -> None:
    env = TextArenaEnv(env_config={"game": game, "max_steps_per_episode": 4})
    prototype = env._factory._prototype
    before = {name: list(value) for name, value in vars(prototype).items() if isinstance(value, list | set)}
    env.rollout([{"seed": seed} for seed in range(3)], ScriptedAgent(["[word]", "[other]"], repeat_last=True))
    assert before == {name: list(value) for name, value in vars(prototype).items() if isinstance(value, list | set)}


def test_nltks_words_are_demanded_with_the_command_that_fetches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str:
        raise LookupError(name)

    monkeypatch.setattr(nltk.data, "find", find)
    with pytest.raises(ConfigError, match=r"run python -m nltk\.downloader words averaged_perceptron_tagger_eng once"):
        TextArenaEnv(env_config={"game": "Wordle-v0", "word_list": "nltk"})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "must be set to the id of a game"),
        ({"game": "Wordel-v0"}, "did you mean 'Wordle-v0'"),
        ({"game": "TicTacToe-v0", "num_players": 3}, "must be 2 for TicTacToe-v0, got 3"),
        ({"game": "Poker-v0", "num_players": 1}, "must be 2 to 15 for Poker-v0, got 1"),
        ({"game": "PublicGoodsGame-v0", "num_players": 1}, "must be 2 to 15"),
        ({"game": "TicTacToe-v0", "seat": 2}, r"must be an int in \[0, 2\)"),
        ({"game": "GuessTheNumber-v0", "game_options": {"max_numer": 9}}, "max_numer"),
        ({"game": "Klondike-v0"}, "cannot be created by the installed version of TextArena: SyntaxError"),
        ({"game": "ScorableGames-v0"}, "cannot be created by the installed version of TextArena: FileNotFoundError"),
        (
            {"game": "GuessTheNumber-v0", "game_options": {"max_number": "x"}},
            "does not fit GuessTheNumber-v0: TypeError",
        ),
        ({"game": "2048-v0", "game_options": {"board_size": 1}}, "Board size must be at least 2"),
        ({"game": "TwentyQuestions-v0"}, "requires a language model as gamemaster"),
        ({"game": "TicTacToe-v0", "opponent": "ramdom"}, "did you mean 'random'"),
        ({"game": "TicTacToe-v0", "opponent": {"7": "random"}}, "the role of an opponent must be one of 0, 1, got '7'"),
        ({"game": "ThreePlayerTicTacToe-v0", "opponent": {"1": "first"}}, "which is drawn: got none for 0, 2"),
        ({"game": "ThreePlayerTicTacToe-v0", "seat": 0, "opponent": {"1": "first"}}, "the agent's, 0: got none for 2"),
        ({"game": "TicTacToe-v0", "seat": 1, "opponent": {"0": "first", "1": "first"}}, "which is the agent's own"),
        ({"game": "TicTacToe-v0", "opponent": {"1": "self"}}, "for the agent to play every role"),
        ({"game": "KuhnPoker-v0", "opponent": "self", "shared_conversation": True}, "hide from each other"),
        ({"game": "KuhnPoker-v0", "opponent": "self", "history": "rerender"}, "separate conversations"),
        ({"game": "Wordle-v0", "word_list": "mine"}, "one of 'hunspell', 'nltk'"),
    ],
)
def test_what_cannot_be_played_is_refused_with_a_sentence(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TextArenaEnv(env_config=config)


def test_no_broken_game_is_taken_for_one_that_runs() -> None:
    broken = [game for game, entry in catalogue().items() if entry.status == "broken"]
    for game in broken:
        with pytest.raises(ConfigError, match=rf"{game} (cannot be created by the installed version|needs Python)"):
            TextArenaEnv(env_config={"game": game})


def test_a_seat_that_no_game_has_is_a_wrong_task() -> None:
    env = TextArenaEnv(env_config={"game": "TicTacToe-v0"})
    with pytest.raises(TaskError, match=r"\[0, 2\)"):
        env.rollout([{"seed": 1, "seat": 5}], ScriptedAgent(["[0]"]))


def test_a_task_does_not_seat_the_agent_where_nobody_is_left_to_play_its_seat() -> None:
    env = TextArenaEnv(env_config={"game": "TicTacToe-v0", "opponent": {"1": "first"}})
    rollouts = env.rollout([{"seed": seed} for seed in range(8)], ScriptedAgent(["[4]", "[5]"], repeat_last=True))
    assert {(one.error, one.turns[0].role) for one in rollouts} == {(None, 0)}
    with pytest.raises(TaskError, match="every role but the agent's, 1: got none for 0"):
        env.rollout([{"seed": 1, "seat": 1}], ScriptedAgent(["[0]"]))


def test_rows_build_the_environment_that_plays_them() -> None:
    config = {"game": "TicTacToe-v0", "opponent": "first", "seat": 0}
    rows = TextArenaEnv.get_train_dataset(config, size=3)
    env = make(rows[0])
    assert isinstance(env, TextArenaEnv)
    assert len(env.rollout(rows, ScriptedAgent(["[4]", "[5]", "[3]", "[8]", "[7]"], repeat_last=True))) == 3
    evaluation = TextArenaEnv.get_eval_dataset(config, size=50, seed=4)
    seeds = {row["task_data"]["seed"] for row in TextArenaEnv.get_train_dataset(config, size=50, seed=4)}
    assert not seeds & {row["task_data"]["seed"] for row in evaluation}
    with pytest.raises(ConfigError, match="did you mean"):
        TextArenaEnv.get_train_dataset(config, siz=3)
    with pytest.raises(ConfigError, match="is not a game of TextArena"):
        TextArenaEnv.get_train_dataset({"game": "Nothing"})


def test_a_message_without_news_reports_that_it_is_ones_turn() -> None:
    assert text_of([], 0, {}) == NOTHING_NEW


def test_a_message_that_is_none_fails_the_episode() -> None:
    class Kind:
        name = "GAME_MESSAGE"

    with pytest.raises(ValueError, match="must be"):
        text_of([(0, 7, Kind())], 0, {})
