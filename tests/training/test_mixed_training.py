"""One run over four different environments, a tool one among them, with the tiny policy of all their words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from games import logged, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "envs"))
from mixed_envs import Guess, LookUp, SayItTwice, SayTheColor

from agentsgym import Curriculum, GRPOEnvTrainer, PolicyAgent, evaluate_mixed, imitate, make, mix, tiny_policy
from agentsgym.tiny import call_text
from agentsgym.training import tiny_imitation_config

pytestmark = pytest.mark.filterwarnings("default")

SOURCES: dict[str, Any] = {
    "color": SayTheColor,
    "twice": SayItTwice,
    "guess": (Guess, {"highest": 3}, [{"seed": seed} for seed in range(8)]),
    "tool": (LookUp, {}, [{"word": "one"}, {"word": "two"}]),
}


class Teacher:
    """Plays all four, the tool as text, as the policy is to call it."""

    def get_action(self, messages: list[Any], agent_state: Any) -> tuple[str, Any]:
        requested = messages[-1]["content"]
        turn = (agent_state or 0) + 1
        if requested.startswith("What is "):
            return call_text("look_up", {"word": requested.removeprefix("What is ")}), turn
        if requested.startswith("Say "):
            return requested.removeprefix("Say "), turn
        return (str(turn) if "number" in requested or requested == "No." else requested), turn


def test_one_run_trains_on_four_environments(tmp_path: Path) -> None:
    rows = mix(SOURCES, size=64)
    model, tokenizer = tiny_policy(rows, agent=Teacher(), num_episodes=16, hidden_size=32, num_heads=2)
    demonstrations = [
        trajectory
        for name in SOURCES
        for own in [[row for row in rows if row["environment"] == name]]
        for trajectory in make(own[0], tokenizer).rollout(own, Teacher())
    ]
    assert not any(trajectory.failed for trajectory in demonstrations)
    assert all(tokenizer.unk_token_id not in trajectory.token_ids for trajectory in demonstrations)
    imitate(model, demonstrations, tokenizer, tiny_imitation_config(150, disable_tqdm=True, use_cpu=True))
    before = evaluate_mixed(PolicyAgent(model, tokenizer, max_turn_tokens=12), rows, tokenizer)
    assert all(part.num_failed == 0 for part in before.by_environment.values())
    trainer = GRPOEnvTrainer(
        model,
        None,
        settings(tmp_path, max_steps=4, per_device_train_batch_size=32, max_turn_tokens=12, learning_rate=1e-4),
        train_dataset=rows,
        processing_class=tokenizer,
        curriculum=Curriculum("environment", low=0.01, high=0.99),
    )
    trainer.train()
    assert logged(trainer, "failed") == [0.0] * 4
    assert {level for level, _ in trainer.curriculum.state_dict()["results"]} == set(SOURCES)
    after = evaluate_mixed(trainer.agent, rows, tokenizer)
    assert set(after.by_environment) == set(SOURCES)
    called = [one for one in after.by_environment["tool"].trajectories if one.messages[1].get("tool_calls")]
    assert called  # what it learned to write is read as a call, and answered
    assert all(one.messages[2]["content"] in {"un", "deux", "unknown"} for one in called)
