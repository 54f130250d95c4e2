"""Rollouts that run ahead of training on real vLLM servers, which pause for weights, die, and come back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from cpu_support import CPUGeneration, Server, saved_policy, served
from datasets import Dataset
from games import Snapshots
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer import grpo_trainer

from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, TwentyQuestionsEnv
from agentsgym.store.reader import RolloutStore
from agentsgym.training.config import GRPOEnvConfig
from agentsgym.training.trainer import GRPOEnvTrainer

GAME = {
    "objects": list(DEMO_OBJECTS),
    "properties": list(DEMO_PROPERTIES),
    "max_steps_per_episode": 12,
    "error_allowance": 12,
}
NUM_STEPS, NUM_ROWS = 6, 16
TEMPERATURE = 1.3
EXACT = 1e-4


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The game's own tiny policy."""
    return saved_policy(GAME, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def servers(model_folder: Path) -> Generator[list[Server]]:
    """Two of them."""
    with served(model_folder) as one, served(model_folder) as other:
        yield [one, other]


class DeadlyGame(TwentyQuestionsEnv):
    """Kills a server in the middle of a batch, and starts it again."""

    victim: ClassVar[Server]
    revival: ClassVar[threading.Thread]
    turns = 0

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        self.turns += 1
        if self.turns == NUM_ROWS * 15:
            self.victim.end(signal.SIGKILL)
            type(self).revival = threading.Thread(target=self.victim.start)
            self.revival.start()
        return super()._step_episode(session_id, state, action)


def trainer_of(
    env_class: type[TwentyQuestionsEnv],
    model_folder: Path,
    folder: Path,
    servers: list[Server],
    peft_config: Any = None,
    **changes: Any,
) -> GRPOEnvTrainer:
    args = GRPOEnvConfig(
        output_dir=str(folder),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=NUM_ROWS,
        num_generations=4,
        max_turn_tokens=8,
        max_completion_length=300,
        learning_rate=1e-2,
        temperature=TEMPERATURE,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=[server.url for server in servers],
        store_rollouts=str(folder / "rollouts"),
        **changes,
    )
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    env = env_class(AutoTokenizer.from_pretrained(model_folder), GAME)
    dataset = Dataset.from_list([{"task_data": {"solution": name, "seed": 0}} for name in DEMO_OBJECTS[:8]])
    return GRPOEnvTrainer(model, env, args, train_dataset=dataset, peft_config=peft_config)


def gaps(records: list[Any], model: Any, weights: dict[int, Any]) -> list[float]:
    """How far the log-probabilities of each turn are from those of the version that it bears."""
    found: list[float] = []
    for one in records:
        ids = torch.tensor([one.trajectory.token_ids])
        for turn in one.trajectory.turns:
            model.load_state_dict(weights[turn.policy_version])
            with torch.no_grad():
                table = (model(ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            places = range(turn.start, turn.stop)
            output = one.trajectory.logprobs
            found.append(max(abs(table[i - 1, ids[0, i]].item() - output[i]) for i in places))
    return found


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_no_turn_is_older_than_it_may_be_and_the_servers_are_fed_all_the_time(
    max_staleness: int, model_folder: Path, servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", CPUGeneration)
    trainer = trainer_of(TwentyQuestionsEnv, model_folder, tmp_path, servers, max_staleness=max_staleness)
    snapshots = Snapshots(trainer.model)
    trainer.add_callback(snapshots)
    trainer.train()
    records = [*RolloutStore(tmp_path / "rollouts").records()]
    assert len(records) == NUM_STEPS * NUM_ROWS
    assert not any(one.trajectory.failed for one in records)
    ages = [one.step - turn.policy_version for one in records for turn in one.trajectory.turns]
    assert 0 < max(ages) <= max_staleness
    assert min(ages) >= 0
    apart = gaps(records, AutoModelForCausalLM.from_pretrained(model_folder), snapshots.weights)
    num_exact = sum(gap < EXACT for gap in apart)
    print(f"{num_exact} of {len(apart)} turns are exactly those of their version; the largest gap is {max(apart):.2g}")
    assert num_exact > 0.5 * len(apart)  # the others were open in a pause, or look back at what was
    logs = [log for log in trainer.state.log_history if "staleness/mean" in log]
    assert len(logs) == NUM_STEPS
    assert all(log["exact"] == 1.0 for log in logs)
    print([log["staleness/mixed_rollouts"] for log in logs])


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_server_that_is_killed_and_comes_back_costs_no_rollout(
    max_staleness: int, model_folder: Path, servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", CPUGeneration)
    DeadlyGame.victim = servers[1]
    trainer = trainer_of(DeadlyGame, model_folder, tmp_path, servers, max_staleness=max_staleness)
    trainer.train()
    DeadlyGame.revival.join()
    assert trainer.state.global_step == NUM_STEPS
    records = [*RolloutStore(tmp_path / "rollouts").records()]
    assert len(records) == NUM_STEPS * NUM_ROWS
    assert not any(one.trajectory.failed for one in records)
