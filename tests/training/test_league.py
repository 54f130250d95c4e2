"""A league of frozen players, and a policy that plays both seats: who is drawn, rated, resumed and trained."""

from __future__ import annotations

import pickle
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from games import logged, recording, settings

from agentsgym import GRPOEnvTrainer, RandomAgent, ScriptedAgent, tiny_policy
from agentsgym.envs.TextArena import LegalAgent, TextArenaEnv
from agentsgym.errors import ConfigError, MissingDependencyError
from agentsgym.training.selection.league import League
from agentsgym.types import Trajectory, TurnRequest

CONFIG: dict[str, Any] = {"game": "TicTacToe-v0", "errors_in_a_row": 0, "seat": 0}
CELLS = [f"[{cell}]" for cell in range(9)]


def fixed(**options: Any) -> League:
    players = {
        name: ScriptedAgent([f"[{cell}]"], repeat_last=True) for cell, name in enumerate(("weak", "even", "strong"))
    }
    return League(players, **options)


def request(session: str, seed: int) -> TurnRequest:
    return TurnRequest(
        session_id=f"{session}/player 1", messages=[{"role": "user", "content": ""}], token_ids=(), seed=seed
    )


def test_ratings_find_the_order_of_strength() -> None:
    league, generator = fixed(), random.Random(0)
    for name, chance in [("weak", 0.9), ("even", 0.5), ("strong", 0.1)] * 60:
        league.record(name, "won" if generator.random() < chance else "lost")
    rows = league.table()
    names = [row["name"] for row in rows]
    assert names[0] == "strong"
    assert names[-1] == "weak"
    assert rows[0]["rating"] > rows[-1]["rating"] + 2 * (rows[0]["uncertainty"] + rows[-1]["uncertainty"])
    assert sum(row[name] for row in rows if row["name"] != "policy" for name in ("won", "drawn", "lost")) == 180


def test_a_draw_brings_ratings_together() -> None:
    league = fixed()
    league.record("strong", "lost")
    before = league.members["strong"].rating.mu - league.rating.mu
    league.record("strong", "drawn")
    assert 0 < league.members["strong"].rating.mu - league.rating.mu < before


def test_the_player_is_drawn_by_the_seed_and_stays_for_the_episode() -> None:
    drawn: Counter[str] = Counter()
    for seed in range(300):
        first, second = (fixed(seed=7) for _ in range(2))
        [one] = first.act([request("a", seed)])
        [other] = second.act([request("b", seed)])
        assert one.agent_state[0] == other.agent_state[0]
        again = first.act(
            [TurnRequest(session_id="a/player 1", messages=[], token_ids=(), agent_state=one.agent_state)]
        )
        assert again[0].agent_state[0] == one.agent_state[0]
        drawn[one.agent_state[0]] += 1
    assert min(drawn.values()) > 60
    assert len(drawn) == 3


@pytest.mark.parametrize(("draw", "expected"), [("prioritized", 1 / 12), ("uniform", 1 / 3)])
def test_players_that_are_beaten_are_drawn_less_often(draw: str, expected: float) -> None:
    league = fixed(draw=draw)
    for _ in range(4):
        league.record("weak", "won")  # (4 + 1) / (4 + 2) of the games: 1/6 is left
    league.record("even", "drawn")
    for _ in range(2):
        league.record("strong", "lost")
    left = 1 / 6, 1 / 2, 3 / 4
    chance = left[0] / sum(left) if draw == "prioritized" else expected
    drawn = Counter(league.act([request("s", seed)])[0].agent_state[0] for seed in range(2000))
    assert drawn["weak"] / 2000 == pytest.approx(chance, abs=0.035)


def trainer_of(
    folder: Path, league: League, model: Any, tokenizer: Any, config: Any = CONFIG, **changes: Any
) -> GRPOEnvTrainer:
    env = TextArenaEnv(tokenizer, config, opponent=league)
    rows = Dataset.from_list([{"task_data": {"seed": seed}} for seed in range(8)])
    agent = changes.pop("agent", None)
    args = settings(folder, **{"max_steps": 4, "max_completion_length": 600, **changes})
    return GRPOEnvTrainer(model, env, args, train_dataset=rows, callbacks=[league], agent=agent)


@pytest.fixture(scope="module")
def policy() -> tuple[Any, Any]:
    played = TextArenaEnv(None, CONFIG).rollout([{"seed": 1}, {"seed": 2}], ScriptedAgent(CELLS))
    texts = sorted({message["content"] for one in played for message in one.messages})
    return tiny_policy([*texts, *CELLS], hidden_size=32, num_heads=2)


@pytest.mark.parametrize(
    ("game", "moves"),
    [("KuhnPoker-v0", ["[check]", "[bet]", "[call]", "[fold]"]), ("ConnectFour-v0", [f"[col {k}]" for k in range(7)])],
)
def test_poker_and_connect_four_have_leagues_too(game: str, moves: list[str], tmp_path: Path) -> None:
    config = {"game": game, "seat": 0}
    model, tokenizer = tiny_policy([*moves, "[GAME] player 0 1"], hidden_size=32, num_heads=2)
    league = League({"random": RandomAgent(moves)}, snapshot_steps=100, max_turn_tokens=4)
    # the policy that is trained samples no legal moves yet
    changes: Any = {"max_steps": 1, "max_completion_length": 4000, "agent": RandomAgent(moves, seed=1)}
    with trainer_of(tmp_path, league, model, tokenizer, config, **changes) as trainer:
        trainer.train()
    assert sum(sum(one.results.values()) for one in league.members.values()) > 0
    assert {row["name"] for row in league.table()} == {"policy", "random", "step 0"}


def copied(policy: tuple[Any, Any]) -> Any:
    model = type(policy[0])(policy[0].config)
    model.load_state_dict(policy[0].state_dict())
    model.generation_config = policy[0].generation_config
    return model


def numbers(league: League) -> list[dict[str, Any]]:
    return league.table()


def test_a_run_rates_snapshots_and_a_resumed_one_goes_on_as_if_it_had_not_stopped(
    policy: tuple[Any, Any], tmp_path: Path
) -> None:
    def league() -> League:
        return League({"first": ScriptedAgent(CELLS)}, snapshot_steps=1, max_snapshots=3, max_turn_tokens=4)

    whole = league()
    with trainer_of(tmp_path / "whole", whole, copied(policy), policy[1]) as trainer:
        trainer.train()
    assert len(whole.members) == 4
    assert "step 4" in whole.members
    assert sum(sum(one.results.values()) for one in whole.members.values()) <= 4 * 8
    assert logged(trainer, "league/rating")  # of the batch before
    assert whole.metrics["league/rating"] == whole.rating.mu
    frozen: Any = whole.members["step 4"].agent
    live = trainer.model.state_dict()
    assert all(torch.equal(live[name], tensor) for name, tensor in frozen.model.state_dict().items())
    assert not any(tensor.requires_grad for tensor in frozen.model.parameters())

    halves = [league(), league()]
    saving = {"save_strategy": "steps", "save_steps": 2}
    with trainer_of(tmp_path / "half", halves[0], copied(policy), policy[1], **saving, max_steps=2) as first:
        first.train()
    with trainer_of(tmp_path / "half", halves[1], copied(policy), policy[1], **saving) as second:
        second.train(resume_from_checkpoint=True)
    assert numbers(halves[1]) == numbers(whole)
    for name, tensor in second.model.state_dict().items():
        assert torch.equal(tensor, live[name])

    other = League(snapshot_steps=1)
    with (
        trainer_of(tmp_path / "half", other, copied(policy), policy[1], **saving) as third,
        pytest.raises(ConfigError, match=r"has the players \['first'\], which this league lacks"),
    ):
        third.train(resume_from_checkpoint=True)


def test_rollouts_ahead_of_training_are_refused(policy: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a league requires max_staleness=0, got 2"):
        League().on_train_begin(settings(tmp_path, max_staleness=2), None, None)


def test_snapshots_see_what_the_policy_sees(policy: tuple[Any, Any]) -> None:
    seen: list[str] = []

    def history(messages: list[Any]) -> list[Any]:
        seen.append(messages[-1]["content"])
        return [{"role": "user", "content": CELLS[4]}]

    league = League(history=history, max_turn_tokens=2)
    league.add_snapshot(*policy, "step 0")
    env = TextArenaEnv(policy[1], CONFIG, opponent=league)
    env.rollout([{"seed": 3}], ScriptedAgent(CELLS))
    assert seen


def test_the_snapshot_that_is_beaten_most_often_is_dropped(policy: tuple[Any, Any]) -> None:
    league = League(max_snapshots=2)
    for step in range(2):
        league.add_snapshot(*policy, f"step {step}")
    league.record("step 1", "won")
    league.record("step 0", "lost")
    league.add_snapshot(*policy, "step 2")
    assert [*league.members] == ["step 0", "step 2"]


def test_what_cannot_work_is_a_sentence(policy: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the league has no players: pass it to the trainer in callbacks"):
        League().act([request("a", 1)])
    with pytest.raises(ConfigError, match="snapshot_steps must be a positive int, got 0"):
        League(snapshot_steps=0)
    with pytest.raises(ConfigError, match="draw cannot be 'best'; valid names: 'prioritized', 'uniform'"):
        League(draw="best")
    with pytest.raises(ConfigError, match="a league plays in the process that trains"):
        pickle.dumps(fixed())
    monkeypatch.setitem(sys.modules, "openskill.models", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'agentsgym\[league\]'"):
        League()


TIC_TAC_TOE = {"game": "TicTacToe-v0", "opponent": "self", "opening_moves": 2}
KUHN_POKER = {"game": "KuhnPoker-v0", "opponent": "self"}
PLAIN: dict[str, Any] = {
    "advantage_estimator": "return_to_go",
    "estimator_kwargs": {"baseline": "none"},
    "scale_rewards": "none",
}


def selfplay_trainer(folder: Path, config: dict[str, Any], **changes: Any) -> GRPOEnvTrainer:
    """A trainer whose games are random legal play, so that they come to an end."""
    text_env = TextArenaEnv(env_config=config)
    model, tokenizer = tiny_policy(text_env, agent=LegalAgent(text_env), num_episodes=64, hidden_size=32, num_heads=2)
    env = TextArenaEnv(tokenizer, config)
    return GRPOEnvTrainer(
        model,
        env,
        settings(folder, **{"max_completion_length": 2000, **changes}),
        train_dataset=TextArenaEnv.get_train_dataset(config, size=8),
        agent=LegalAgent(env, seed=1),
    )


def generated(trainer: GRPOEnvTrainer) -> tuple[list[Trajectory], dict[str, Any]]:
    """The games of one generation batch, and the batch that is trained on."""
    dataset: Any = trainer.train_dataset
    generate, played = trainer.generator.generate, recording(trainer)
    batch = trainer._generate_and_score_completions([dataset[i // 4] for i in range(8)])
    trainer.generator.generate = generate  # type: ignore[method-assign]
    return list(played[0].trajectories), batch


def test_a_board_game_played_with_itself_rewards_each_seat_on_its_own_tokens(tmp_path: Path) -> None:
    games, batch = generated(selfplay_trainer(tmp_path, TIC_TAC_TOE, **PLAIN))
    assert len({game.final_rewards[0] for game in games}) > 1
    for row, game in enumerate(games):
        assert {turn.role for turn in game.turns} == {0, 1}
        assert game.final_rewards[0] == -game.final_rewards[1]
        expected = torch.zeros(batch["advantages"].shape[1])
        is_agents = torch.zeros(batch["agent_token_mask"].shape[1])
        for turn in game.turns:
            expected[turn.start : turn.stop] = game.final_rewards[turn.role]
            is_agents[turn.start : turn.stop] = 1
        assert batch["advantages"][row].tolist() == expected.tolist()
        assert batch["agent_token_mask"][row].tolist() == is_agents.tolist()


def test_players_who_hide_cards_are_trained_on_what_each_has_seen(tmp_path: Path) -> None:
    trainer = selfplay_trainer(tmp_path, KUHN_POKER, layout="turn", **PLAIN)
    games, batch = generated(trainer)
    expected, found = Counter[tuple[int, float]](), Counter[tuple[int, float]]()
    for game in games:
        for turn in game.turns:
            expected[turn.role, game.final_rewards[turn.role]] += turn.stop - turn.start
    rows = zip(*(batch[name] for name in ("prompt_completion_ids", "attention_mask", "agent_token_mask")), strict=True)
    tokenizer: Any = trainer.processing_class
    for (ids, attended, is_agents), advantages in zip(rows, batch["advantages"], strict=True):
        if not is_agents.any():  # a row that fills up the batch
            continue
        text = tokenizer.decode(ids[attended.bool()])
        [seat] = map(int, re.findall(r"\[Player (\d)\]\n", text))  # the header, not what a player answered
        assert f"You are Player {seat} " in text
        assert f"You are Player {1 - seat} " not in text
        dealt = set(re.findall(r"### Starting round (\d).*Your card is: '(\w)'", text))
        assert len(dealt) == len({number for number, _ in dealt})  # its own card in each round, and no other
        for advantage in advantages[is_agents.bool()].tolist():
            found[seat, advantage] += 1
    assert found == expected
    assert len(expected) > 1


@pytest.mark.parametrize(
    ("config", "layout"), [(TIC_TAC_TOE, "trajectory"), (KUHN_POKER, "turn")], ids=["one view", "two views"]
)
def test_both_seats_learn_in_one_step_and_each_has_its_metrics(
    config: dict[str, Any], layout: str, tmp_path: Path
) -> None:
    trainer = selfplay_trainer(tmp_path, config, layout=layout, advantage_estimator="rae")
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
    first, second = (logged(trainer, f"reward/by_role/{seat}") for seat in (0, 1))
    assert len(first) == 2
    assert first == [-reward for reward in second]
    for name in ("win_rate", "advantage", "advantage_std"):
        assert all(len(logged(trainer, f"{name}/by_role/{seat}")) == 2 for seat in (0, 1)), name
    assert logged(trainer, "failed") == [0.0, 0.0]
