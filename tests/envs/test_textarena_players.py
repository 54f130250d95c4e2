"""The other seats: legal moves, agents of any kind, the policy itself, and what happens when they break."""

from __future__ import annotations

import itertools
import pickle
import random
import re
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from agentsgym import Action, Agent, PolicyAgent, ScriptedAgent, Trajectory, evaluate, tiny_policy
from agentsgym.agents.base import AsyncAgent
from agentsgym.envs.TextArena import LegalAgent, TextArenaEnv, register_player
from agentsgym.errors import ConfigError
from agentsgym.rollouts.thread_pool import EnvThreadPool
from agentsgym.types import Message, TurnRequest

TIC_TAC_TOE = {"game": "TicTacToe-v0", "seat": 0}


class Listening(Agent):
    """Plays a script and keeps what it was shown."""

    def __init__(self, moves: Sequence[str]) -> None:
        self.moves = moves
        self.shown: list[list[Message]] = []
        self.num_finished = 0

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        self.shown.append([*messages])
        turn = agent_state or 0
        return self.moves[turn], turn + 1

    def finish(self) -> None:
        self.num_finished += 1


def play(env: TextArenaEnv, moves: Sequence[str], seed: int = 1, **options: Any) -> Trajectory:
    return env.rollout([{"seed": seed}], ScriptedAgent(list(moves), repeat_last=True), **options)[0]


def test_an_agent_plays_the_other_seat_in_a_conversation_of_its_own() -> None:
    other = Listening(["[3]", "[4]", "[8]"])
    rollout = play(TextArenaEnv(env_config=TIC_TAC_TOE, opponent=other), ["[0]", "[1]", "[2]"])
    assert (rollout.final_reward, rollout.success) == (1.0, True)
    assert [turn.role for turn in rollout.turns] == [0, 0, 0]
    assert other.shown[0][0]["content"].startswith("You are Player 1 in Tic Tac Toe.")
    assert [message["role"] for message in other.shown[1]] == ["user", "assistant", "user"]
    assert "[Player 0] [1]" in other.shown[1][-1]["content"]
    assert "You are Player 0" not in str(other.shown)
    assert other.num_finished == 1


def test_a_lost_game_is_rewarded_as_one() -> None:
    rollout = play(
        TextArenaEnv(env_config=TIC_TAC_TOE, opponent=ScriptedAgent(["[3]", "[4]", "[5]"])), ["[0]", "[1]", "[8]"]
    )
    assert (rollout.final_reward, rollout.success) == (-1.0, False)


@pytest.mark.parametrize("seat", [0, 1])
def test_the_agent_plays_the_seat_it_is_given(seat: int) -> None:
    env = TextArenaEnv(env_config={"game": "TicTacToe-v0"})
    [rollout] = env.rollout([{"seed": 1, "seat": seat}], LegalAgent(env))
    assert rollout.messages[0]["content"].startswith(f"You are Player {seat}")
    assert {turn.role for turn in rollout.turns} == {seat}


def test_seats_are_drawn_by_task_and_equal_in_its_rollouts() -> None:
    env = TextArenaEnv(env_config={"game": "TicTacToe-v0"})
    rollouts = env.rollout([{"seed": seed} for seed in range(12)], LegalAgent(env), num_rollouts=2)
    seats = [rollout.turns[0].role for rollout in rollouts]
    assert seats[::2] == seats[1::2]
    assert set(seats) == {0, 1}


@pytest.mark.parametrize(
    "game", ["TicTacToe-v0", "ConnectFour-v0", "KuhnPoker-v0", "Nim-v0", "LiarsDice-v0", "SpellingBee-v0"]
)
def test_random_players_make_legal_moves(game: str) -> None:
    env = TextArenaEnv(env_config={"game": game, "max_steps_per_episode": 60})
    rollouts = env.rollout([{"seed": seed} for seed in range(6)], LegalAgent(env))
    assert all(rollout.error is None for rollout in rollouts)
    assert not any(turn.invalid for rollout in rollouts for turn in rollout.turns[:1])
    assert any("invalid" not in rollout.info["reason"].lower() for rollout in rollouts)


def test_random_play_of_tictactoe_is_fair_to_none_and_ends_in_a_result() -> None:
    env = TextArenaEnv(env_config=TIC_TAC_TOE)
    found = evaluate(env, LegalAgent(env), [{"seed": seed} for seed in range(120)])
    assert found.win_rate is not None
    assert 0.45 < found.win_rate.mean < 0.72  # 0.585 exactly for the first player


def test_the_first_legal_move_is_always_the_same() -> None:
    env = TextArenaEnv(env_config={**TIC_TAC_TOE, "opponent": "first"})
    rollout = play(env, ["[8]", "[7]", "[5]", "[4]"])
    assert "[Player 1] [0]" in rollout.messages[2]["content"]
    assert "[Player 1] [1]" in rollout.messages[4]["content"]


def test_more_than_two_seats_may_be_played_by_different_players() -> None:
    other = Listening(["[Bid: 5, 6]", "[Call]", "[Call]", "[Call]"])
    config = {"game": "LiarsDice-v0", "num_players": 3, "seat": 0}
    env = TextArenaEnv(env_config=config, opponent={1: other, 2: ScriptedAgent(["[Call]"], repeat_last=True)})
    rollout = play(env, ["[Bid: 1, 2]", "[Call]"], failures=None)
    assert rollout.error is None
    assert other.shown


def test_agents_by_name_are_in_rows() -> None:
    register_player("corner", lambda: ScriptedAgent(["[0]", "[2]", "[6]", "[8]"], repeat_last=True))
    env = TextArenaEnv(env_config={**TIC_TAC_TOE, "opponent": "corner"})
    assert "[Player 1] [0]" in play(env, ["[4]", "[1]", "[7]"]).messages[2]["content"]
    with pytest.raises(ConfigError, match="must be a non-empty string other than 'random'"):
        register_player("random", lambda: None)


class Drawing(Agent):
    """Draws from one stream of its own, whoever draws."""

    made: ClassVar[list[int]] = []

    def __init__(self, seed: int = 0) -> None:
        self.stream = random.Random(seed)
        self.made.append(seed)
        self.num_finished = 0

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        return f"[{self.stream.randrange(9)}]", None


def test_a_factory_that_takes_a_seed_makes_an_agent_for_each_episode() -> None:
    Drawing.made = []
    register_player("drawing", Drawing)
    config = {"game": "TicTacToe-v0", "seat": 1, "opponent": "drawing", "errors_in_a_row": 50}
    tasks = [{"seed": seed} for seed in range(4)]
    moves = ScriptedAgent([f"[{cell}]" for cell in (4, 0, 8, 2, 6, 1, 3, 5, 7)], repeat_last=True)
    together = TextArenaEnv(env_config=config).rollout(tasks, moves, 2)
    apart = TextArenaEnv(env_config=config).rollout(tasks, moves, 2, max_concurrent=1)
    copied = pickle.loads(pickle.dumps(TextArenaEnv(env_config=config))).rollout(tasks, moves, 2)
    assert [one.messages for one in together] == [one.messages for one in apart] == [one.messages for one in copied]
    assert [one.messages for one in together[::2]] == [one.messages for one in together[1::2]]
    assert len(Drawing.made) == 24
    assert len(set(Drawing.made)) == 4


def test_a_policy_samples_by_the_seed_of_a_request() -> None:
    model, tokenizer = tiny_policy([f"[{cell}]" for cell in range(9)], hidden_size=16, num_layers=1, num_heads=1)
    prompt = tokenizer("[0] [1]", add_special_tokens=False)["input_ids"]

    def output(agent: PolicyAgent, *seeds: int | None) -> list[list[int]]:
        requests = [
            TurnRequest(session_id=f"{k} of {id(seeds)}", messages=(), token_ids=prompt, seed=seed, max_new_tokens=12)
            for k, seed in enumerate(seeds)
        ]
        return [list(action.token_ids or ()) for action in agent.act(requests)]

    frozen = PolicyAgent(model, tokenizer, seed=1)
    one, other = output(frozen, 7, 8)
    assert one != other
    assert output(frozen, 8, 7, 7) == [other, one, one]
    assert output(PolicyAgent(model, tokenizer, seed=2), 7) != [one]
    assert output(frozen, None) == output(PolicyAgent(model, tokenizer, seed=1), None)  # a seed takes no number


class Raising(Agent):
    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        if "[Player 0] [1]" in messages[-1]["content"]:
            raise OSError("the server is gone")
        return "[8]" if len(messages) == 1 else "[5]", agent_state


def test_an_opponent_that_raises_fails_its_own_episode() -> None:
    env = TextArenaEnv(env_config=TIC_TAC_TOE, opponent=Raising())
    agent = _ByTask([["[0]", "[1]", "[2]"], ["[0]", "[3]", "[6]"]])
    lost, won = env.rollout([{"seed": 1}, {"seed": 2}], agent)
    assert lost.failed
    assert "player 1, failed" in str(lost.error)
    assert "the server is gone" in str(lost.error)
    assert (won.failed, won.final_reward) == (False, 1.0)


class _ByTask(Agent):
    def __init__(self, scripts: list[list[str]]) -> None:
        self.scripts, self.of = scripts, {}

    def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
        answers = []
        for request in requests:
            script = self.scripts[self.of.setdefault(request.session_id, len(self.of))]
            turn = request.agent_state or 0
            answers.append(Action(text=script[turn], agent_state=turn + 1))
        return answers


def test_an_opponent_that_answers_ten_megabytes_fails_its_episode() -> None:
    env = TextArenaEnv(env_config=TIC_TAC_TOE, opponent=ScriptedAgent(["x" * 10_000_000]))
    rollout = play(env, ["[0]"])
    assert rollout.failed
    assert "at most 20000 characters of text, got 10000000 characters" in str(rollout.error)


def test_an_agent_that_answers_ten_megabytes_makes_an_invalid_move() -> None:
    rollout = play(TextArenaEnv(env_config=TIC_TAC_TOE), ["x" * 10_000_000])
    assert not rollout.failed
    assert rollout.turns[0].invalid


def test_an_opponent_that_hangs_is_given_up_after_the_turns_time() -> None:
    released = threading.Event()

    class Hanging(Agent):
        def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
            released.wait(60)
            return "[5]", None

    env = TextArenaEnv(env_config=TIC_TAC_TOE, opponent=Hanging())
    try:
        with EnvThreadPool(1) as pool:
            rollout = play(env, ["[0]"], pool=pool, turn_timeout_s=0.2)
            released.set()
    finally:
        released.set()
    assert rollout.failed


def test_an_opponent_with_coroutines_is_called() -> None:
    class Slow(AsyncAgent):
        async def aact(self, request: TurnRequest) -> Action:
            return Action(text="[7]" if request.agent_state is None else "[8]", agent_state=1)

    assert play(TextArenaEnv(env_config=TIC_TAC_TOE, opponent=Slow()), ["[0]", "[1]", "[2]"]).success is True


def test_a_frozen_policy_plays_the_other_seat_on_exact_tokens() -> None:
    texts = [f"[{cell}]" for cell in range(9)] + ["You are Player 1 in Tic Tac Toe."]
    model, tokenizer = tiny_policy(texts, hidden_size=16, num_layers=1, num_heads=1)
    frozen = PolicyAgent(model, tokenizer, max_turn_tokens=2)
    env = TextArenaEnv(tokenizer, TIC_TAC_TOE, opponent=frozen)
    rollout = play(env, ["[0]", "[1]", "[2]", "[3]"])
    assert rollout.error is None
    assert rollout.info["reason"]


def test_a_game_played_with_itself_has_a_turn_for_every_move_and_rewards_every_seat() -> None:
    env = TextArenaEnv(env_config={"game": "TicTacToe-v0", "opponent": "self"})
    rollout = play(env, ["[0]", "[3]", "[1]", "[4]", "[2]"])
    assert [turn.role for turn in rollout.turns] == [0, 1, 0, 1, 0]
    assert rollout.info["rewards"] == {0: 1.0, 1: -1.0}
    assert rollout.messages[2]["content"].startswith("[Player 1]\nYou are Player 1 in Tic Tac Toe.")
    boards = [message["content"].count("Current Board") for message in rollout.messages if message["role"] == "user"]
    assert boards == [1] * 5  # one conversation, in which nothing is answered twice


def first_view(seed: int, **config: Any) -> str:
    env = TextArenaEnv(env_config={"game": "TicTacToe-v0", "opponent": "self", **config})
    return play(env, ["[0]"], seed=seed).messages[0]["content"]


def test_games_begin_after_random_openings_that_tasks_draw() -> None:
    views = [first_view(seed, opening_moves=3) for seed in range(40)]
    reported = [re.findall(r"^\[Player \d\] \[\d\]$", view, re.MULTILINE) for view in views]
    assert {len(moves) for moves in reported} == {0, 1, 2, 3}
    assert len(set(views)) > 20
    assert [first_view(seed, opening_moves=3) for seed in range(40)] == views
    for view, moves in zip(views, reported, strict=True):
        assert view.startswith(f"[Player {len(moves) % 2}]\n")  # whose turn it is
        assert len(re.findall(r"[XO]", view.rsplit("Current Board:", 1)[1])) == len(moves)
    assert {first_view(seed, opening_moves=0) for seed in range(10)} == {first_view(0)}


def test_an_opening_counts_neither_as_turns_nor_against_the_limit() -> None:
    env = TextArenaEnv(env_config={**TIC_TAC_TOE, "opponent": "first", "opening_moves": 4, "max_steps_per_episode": 3})
    for seed in range(8):
        rollout = env.rollout([{"seed": seed}], LegalAgent(env))[0]
        assert rollout.error is None
        assert 1 <= len(rollout.turns) <= 3
        assert all(turn.role == 0 and not turn.invalid for turn in rollout.turns)


def test_players_who_hide_something_see_their_own_conversation_alone() -> None:
    env = TextArenaEnv(env_config={"game": "KuhnPoker-v0", "opponent": "self"})
    rollout = play(env, ["[check]", "[bet]", "[call]", "[check]", "[check]", "[bet]", "[fold]"])
    assert not env.shares_conversation
    for turn in rollout.turns:
        assert turn.prompt_messages is not None
        shown = [message["content"] for message in turn.prompt_messages]
        assert shown[0].startswith(f"[Player {turn.role}]\nYou are Player {turn.role}")
        assert f"You are Player {1 - turn.role}" not in "".join(shown)
        assert [f"Your card is: '{card}'" in shown[0] for card in "JQK"].count(True) == 1
    for role in (0, 1):  # each goes on from what it was, its own answer between
        views = [turn.prompt_messages or [] for turn in rollout.turns if turn.role == role]
        for before, after in itertools.pairwise(views):
            assert list(after[: len(before)]) == list(before)
            assert [message["role"] for message in after[len(before) :]] == ["assistant", "user"]


class Master(Agent):
    """Answers yes, and keeps its requests."""

    def __init__(self) -> None:
        self.requested: list[str] = []

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        assert len(messages) == 1
        self.requested.append(messages[0]["content"])
        return "Yes", None


def test_any_agent_is_the_gamemaster() -> None:
    master = Master()
    env = TextArenaEnv(env_config={"game": "TwentyQuestions-v0", "add_brackets": False}, gamemaster=master)
    rollout = play(env, ["Is it alive?", "[nothing at all]"])
    assert "gamemaster" in master.requested[0]
    assert "Q: Is it alive?" in master.requested[0]
    assert rollout.messages[2]["content"] == "Yes"


def test_any_agent_is_the_jury() -> None:
    class Juror(Agent):
        def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
            return "Player 0" if "carefully" in messages[0]["content"] else "Player 1", None

    env = TextArenaEnv(
        env_config={"game": "ScenarioPlanning-v0", "seat": 0, "game_options": {"jury_size": 3}},
        opponent=ScriptedAgent(["Run."]),
        gamemaster=Juror(),
    )
    assert play(env, ["Go carefully."]).success is True
    assert play(env, ["Jump."]).success is False


def test_a_jury_that_is_split_evenly_makes_a_draw() -> None:
    config = {"game": "ScenarioPlanning-v0", "seat": 0}
    env = TextArenaEnv(env_config=config, opponent=ScriptedAgent(["Run."]), gamemaster=ScriptedAgent(["Neither."]))
    rollout = play(env, ["Jump."])
    assert (rollout.error, rollout.final_reward, rollout.success) == (None, 0.0, False)
