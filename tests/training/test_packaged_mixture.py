"""One run trains on six packaged environments, two of them with tools, and each is measured by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from games import logged, settings

from agentsgym import GRPOEnvTrainer, PolicyAgent, RandomAgent, evaluate_mixed, imitate, make, mix, tiny_policy
from agentsgym.envs import Gymnasium, PriceList, ReasoningEvals, Search, TextArena, TwentyQuestions
from agentsgym.envs.TextArena.references import reference_for
from agentsgym.training import tiny_imitation_config

pytestmark = pytest.mark.filterwarnings("default")

WORLD = {"num_people": 4, "num_firms": 2, "num_towns": 2, "num_rivers": 1, "num_seas": 1}
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SOURCES: dict[str, Any] = {
    "prices": (PriceList.PriceListEnv, {"goods": ["egg", "pear"], "kinds": ["price"], "max_steps_per_episode": 3}),
    "search": (Search.SearchEnv, {"world": WORLD, "top_k": 1, "max_steps_per_episode": 2}),
    "lake": (Gymnasium.GymnasiumEnv, {"make_kwargs": {"is_slippery": False}, "max_steps_per_episode": 6}),
    "number": (
        TextArena.TextArenaEnv,
        {"game": "GuessTheNumber-v0", "game_options": {"max_number": 4}, "max_steps_per_episode": 2},
    ),
    "questions": (
        TwentyQuestions.TwentyQuestionsEnv,
        {
            "objects": list(TwentyQuestions.DEMO_OBJECTS[:4]),
            "properties": list(TwentyQuestions.DEMO_PROPERTIES),
            "max_steps_per_episode": 2,
            "final_guess": True,
        },
    ),
    "sums": (ReasoningEvals.ReasoningEvalsEnv, {"extractor": "number"}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "search": {"hops": [1]},
    "questions": {"split": "all"},
    "sums": {"task": "chain_sum", "difficulty": SUMS},
}
NUMBERS = [f"[{number}]" for number in range(1, 5)]
SUMS_SAID = [str(number) for number in range(-9, 19)]
EACH = 16  # rows of an environment


def rows_of(split: str) -> Any:
    sources = {
        name: (env_class, {**config, "system_prompt": ""}, {"size": EACH, **OPTIONS.get(name, {})})
        for name, (env_class, config) in SOURCES.items()
    }
    return mix(sources, size=EACH * len(sources), split=split)  # type: ignore[arg-type]


def player_of(name: str, env: Any) -> Any:
    """Who knows how to play, or at least how a move is written."""
    players: dict[str, Any] = {
        "prices": PriceList.ReferencePlayer,
        "search": Search.ReferencePlayer,
        "lake": Gymnasium.OptimalPlayer,
        "number": lambda _: reference_for("GuessTheNumber-v0", {"max_number": 4}).optimal_player(),
        "questions": TwentyQuestions.GreedyPlayer,
        "sums": lambda _: RandomAgent(SUMS_SAID),
    }
    return players[name](env)


def imitated(rows: Any) -> tuple[Any, Any]:
    """The tiny policy of all their words, after it has seen what good play looks like."""
    own = {"number": RandomAgent(NUMBERS), "sums": RandomAgent(SUMS_SAID)}  # the others know their words
    model, tokenizer = tiny_policy(rows, agent=own, num_episodes=64, hidden_size=32, num_heads=2)
    demonstrations: list[Any] = []
    for name in SOURCES:
        part = [row for row in rows if row["environment"] == name]
        env = make(part[0], tokenizer)
        demonstrations += env.rollout(part, player_of(name, env))
    assert not any(one.failed for one in demonstrations)
    assert all(tokenizer.unk_token_id not in one.token_ids for one in demonstrations)
    imitate(model, demonstrations, tokenizer, tiny_imitation_config(300, disable_tqdm=True, use_cpu=True))
    return model, tokenizer


def test_one_run_trains_on_six_packaged_environments(tmp_path: Path) -> None:
    rows, unseen = rows_of("train"), rows_of("eval")
    model, tokenizer = imitated(rows)
    before = [parameter.clone() for parameter in model.parameters()]
    trainer = GRPOEnvTrainer(
        model,
        None,
        settings(
            tmp_path,
            per_device_train_batch_size=48,
            per_device_eval_batch_size=48,
            max_turn_tokens=12,
            max_completion_length=500,
            learning_rate=1e-3,
            shuffle_dataset=False,  # so that each batch of 12 task groups holds two of each environment
        ),
        train_dataset=rows,
        eval_dataset=unseen,
        processing_class=tokenizer,
    )
    trainer.train()
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert logged(trainer, "failed") == [0.0, 0.0]
    for name in SOURCES:
        assert logged(trainer, f"failed/by_environment/{name}") == [0.0, 0.0]
        assert len(logged(trainer, f"win_rate/by_environment/{name}")) == 2
    by_environment = [logged(trainer, f"reward/by_environment/{name}") for name in SOURCES]
    assert logged(trainer, "reward") == pytest.approx([sum(parts) / 6 for parts in zip(*by_environment, strict=True)])
    measured = trainer.evaluate()
    assert {key for key in measured if "win_rate/by_environment/" in key} == {
        f"eval_win_rate/by_environment/{name}" for name in SOURCES
    }
    assert measured["eval_failed"] == 0.0
    played = evaluate_mixed(PolicyAgent(model, tokenizer, max_turn_tokens=12), unseen, tokenizer)
    assert {name: part.num_episodes for name, part in played.by_environment.items()} == dict.fromkeys(SOURCES, EACH)
    assert played.num_failed == 0
    for name in ("prices", "search"):  # what it learned to write is read as a call, and answered
        called = [one for one in played.by_environment[name].trajectories if one.messages[1].get("tool_calls")]
        assert called
        assert all(one.messages[2]["role"] == "tool" for one in called)
    assert played.by_environment["lake"].fraction_of_optimal is not None
