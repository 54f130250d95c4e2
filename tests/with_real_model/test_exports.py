"""Games of SmolLM2, exported as rows that TRL's SFT and DPO trainers train it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ran
from datasets import Dataset, load_dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from agentsgym import PolicyAgent, evaluate
from agentsgym.agents.policy.loading import is_slow_in_bfloat16, load_model
from benchmarks.real_games import NumberGuessing

IS_BFLOAT16 = not is_slow_in_bfloat16()
DTYPE = torch.bfloat16 if IS_BFLOAT16 else torch.float32
SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": IS_BFLOAT16,
    "gradient_checkpointing": False,
}


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of easy games, some won and some lost."""
    folder = tmp_path_factory.mktemp("games") / "store"
    model, tokenizer = load_model("smollm2", dtype=DTYPE)
    env = NumberGuessing(tokenizer, {"highest": 2, "max_steps_per_episode": 3})
    tasks = [{"seed": seed} for seed in range(4)]
    result = evaluate(env, PolicyAgent(model, tokenizer, max_turn_tokens=12), tasks, num_rollouts=8, store=folder)
    assert {one.success for one in result.trajectories} == {True, False}
    return folder


def rows(games: Path, to: str, folder: Path) -> Dataset:
    assert ran("export", games, "--to", to, "-o", folder / "rows.jsonl").code == 0
    return load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "cache"))


@pytest.mark.parametrize(
    ("to", "trainer_class", "args_class"), [("sft", SFTTrainer, SFTConfig), ("dpo", DPOTrainer, DPOConfig)]
)
def test_trl_trains_on_exported_games(
    to: str, trainer_class: Any, args_class: Any, games: Path, tmp_path: Path
) -> None:
    model, tokenizer = load_model("smollm2", dtype=DTYPE)
    lora = LoraConfig(r=8, target_modules="all-linear")
    args = args_class(output_dir=str(tmp_path / "out"), **SETTINGS)
    exported = rows(games, to, tmp_path)
    assert len(exported) >= 4
    trainer = trainer_class(
        model=model, args=args, train_dataset=exported, processing_class=tokenizer, peft_config=lora
    )
    trainer.train()
    trained = [one for name, one in trainer.model.named_parameters() if "lora_B" in name]
    assert any(float(one.detach().abs().max()) > 0 for one in trained)
