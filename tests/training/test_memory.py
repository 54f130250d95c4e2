"""Before a micro-batch exceeds the memory of a CPU, a warning states what would fit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from games import GuessNumber, policy, settings, tasks

from agentsgym import GRPOEnvTrainer
from agentsgym.training import memory
from agentsgym.training.memory import activation_bytes, free_memory


def model(**sizes: int | list[int]) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(**sizes)), dtype=torch.float32
    )


def test_the_estimate_is_what_was_measured_of_smollm2() -> None:
    smollm2 = model(num_hidden_layers=30, hidden_size=576, intermediate_size=1536)
    assert activation_bytes(smollm2, is_half=True, recomputes=False) == pytest.approx(1.1e6, rel=0.05)
    assert activation_bytes(smollm2, is_half=False, recomputes=False) == pytest.approx(2.2e6, rel=0.05)
    assert activation_bytes(smollm2, is_half=True, recomputes=True) < 1e5
    assert activation_bytes(model(hidden_size=8), is_half=True, recomputes=False) == 0


def test_the_estimate_takes_the_widest_of_the_layers() -> None:
    sizes, options = {"num_hidden_layers": 2, "hidden_size": 4}, {"is_half": True, "recomputes": False}
    wide = activation_bytes(model(**sizes, intermediate_size=16), **options)
    assert activation_bytes(model(**sizes, intermediate_size=[8, 16]), **options) == wide  # as Gemma 3n lists them


def train(folder: Path, **changes: Any) -> None:
    model, tokenizer = policy(0)
    args = settings(folder, max_steps=2, **changes)
    with GRPOEnvTrainer(model, GuessNumber(tokenizer), args, train_dataset=tasks()) as trainer:
        trainer.train()


@pytest.mark.parametrize(
    ("rows_that_fit", "advice"),
    [(2.5, "per_device_train_batch_size=2 would fit"), (0.5, "a single row does not fit; set gradient_checkpointing")],
)
def test_a_warning_states_what_would_fit(
    rows_that_fit: float, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(memory, "activation_bytes", lambda *_, **__: 1000)
    lengths: list[int] = []
    on_batch = memory.MemoryWarning.on_batch

    def observe(self: Any, observed: Any) -> None:
        lengths.append(int(observed.tokens.attention_mask.sum(1).max()))
        on_batch(self, observed)

    monkeypatch.setattr(memory.MemoryWarning, "on_batch", observe)
    monkeypatch.setattr(memory, "free_memory", lambda: int(rows_that_fit * lengths[-1] * 1000))
    train(tmp_path, shared_prefix="off")
    warnings = [record.getMessage() for record in caplog.records if "a micro-batch of" in record.getMessage()]
    assert warnings
    assert f"rows of up to {lengths[0]} tokens" in warnings[0]
    assert advice in warnings[0]
    assert len(warnings) == len(
        {length for index, length in enumerate(lengths) if length > max(lengths[:index], default=0)}
    )


@pytest.mark.parametrize(("num_free", "advice"), [(120, None), (119, "=7 would"), (50, "=1 would"), (49, "a single")])
def test_tokens_that_rows_share_are_counted_once(
    num_free: int, advice: str | None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Eight rows of 50 tokens, 40 of which they share, are 120 tokens."""
    monkeypatch.setattr(memory, "free_memory", lambda: num_free * 1000)
    monkeypatch.setattr(memory, "activation_bytes", lambda *_, **__: 1000)
    ids = torch.cat([torch.arange(40).expand(8, -1), torch.arange(100, 180).view(8, 10)], 1)
    tokens = SimpleNamespace(ids=ids, attention_mask=torch.ones_like(ids))
    observed: Any = SimpleNamespace(phase=SimpleNamespace(is_training=True), tokens=tokens)
    args = SimpleNamespace(per_device_train_batch_size=8, bf16=False, gradient_checkpointing=False)
    model = SimpleNamespace(packs_rows=True)
    warning = memory.MemoryWarning()
    warning.on_train_begin(args, None, None, model=model)
    for _ in range(2):
        warning.on_batch(observed)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == (advice is not None)
    assert advice is None or advice in found[0]


def test_a_run_that_fits_is_not_warned_about(tmp_path: Path, caplog: Any) -> None:
    train(tmp_path)
    assert "a micro-batch of" not in caplog.text


def test_a_control_group_limits_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    unlimited = free_memory()
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() == pytest.approx(unlimited, rel=0.5)
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_memory() == 300
