"""The policy plays both seats of a game of TextArena's in the real trainer: with one conversation, and with two."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from games import logged, settings

from agentsgym.envs.TextArena import LegalAgent, TextArenaEnv
from agentsgym.tiny import tiny_policy
from agentsgym.training.trainer import GRPOEnvTrainer
from agentsgym.types import Trajectory

TIC_TAC_TOE = {"game": "TicTacToe-v0", "opponent": "self", "opening_moves": 2}
KUHN_POKER = {"game": "KuhnPoker-v0", "opponent": "self"}
PLAIN: dict[str, Any] = {
    "advantage_estimator": "return_to_go",
    "estimator_kwargs": {"baseline": "none"},
    "scale_rewards": "none",
}


def trainer_of(folder: Path, config: dict[str, Any], **changes: Any) -> GRPOEnvTrainer:
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
    played: list[Any] = []
    generate = trainer.generator.generate

    def noted(*args: Any) -> Any:
        played.append(generate(*args))
        return played[-1]

    trainer.generator.generate = noted  # type: ignore[method-assign]
    batch = trainer._generate_and_score_completions([dataset[i // 4] for i in range(8)])
    trainer.generator.generate = generate  # type: ignore[method-assign]
    return list(played[0].trajectories), batch


def test_a_board_game_played_with_itself_rewards_each_seat_on_its_own_tokens(tmp_path: Path) -> None:
    games, batch = generated(trainer_of(tmp_path, TIC_TAC_TOE, **PLAIN))
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
    trainer = trainer_of(tmp_path, KUHN_POKER, layout="turn", **PLAIN)
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
    trainer = trainer_of(tmp_path, config, layout=layout, advantage_estimator="rae")
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
    first, second = (logged(trainer, f"reward/by_role/{seat}") for seat in (0, 1))
    assert len(first) == 2
    assert first == [-reward for reward in second]
    for name in ("win_rate", "advantage", "advantage_std"):
        assert all(len(logged(trainer, f"{name}/by_role/{seat}")) == 2 for seat in (0, 1)), name
    assert logged(trainer, "failed") == [0.0, 0.0]
