"""TRL's own trainer with our rollout function through its vLLM engines, of which vLLM itself is scripted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl.generation.vllm_generation as trl_vllm
import trl.trainer.grpo_trainer as trl_trainer
from games import logged
from stock import Recorded, stock_trainer
from vllm_engines import BuiltGeneration, Guessing
from vllm_stub import stub_server


@pytest.mark.parametrize(
    "mode",
    [{"vllm_mode": "colocate"}, {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True}, {"vllm_mode": "server"}],
    ids=["colocate", "sleeping", "server"],
)
@pytest.mark.parametrize("by_turn", [False, True], ids=["final", "turn"])
def test_rollouts_go_through_trls_engine(
    mode: dict[str, Any], by_turn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(trl_trainer, "VLLMGeneration", BuiltGeneration)
    monkeypatch.setattr(trl_vllm, "SamplingParams", SimpleNamespace, raising=False)
    changes: dict[str, Any] = {"rollouts": {"credit": "turn", "rollouts_per_group": 2}, "scale_rewards": "none"}
    with stub_server(Guessing().script) as server:
        trainer: Any = stock_trainer(
            tmp_path, use_vllm=True, vllm_importance_sampling_mode="token_truncate", vllm_server_base_url=server.url,
            **mode, **(changes if by_turn else {}),
        )  # fmt: skip
        trainer.train()
    engine = trainer.vllm_generation.engine
    assert isinstance(trainer.rollout_func, Recorded)
    for _, call in trainer.rollout_func.calls:
        for ids, logprobs, mask in zip(call["completion_ids"], call["logprobs"], call["env_mask"], strict=True):
            assert len(ids) == len(logprobs) == len(mask)
            assert all(logprob == -0.5 for logprob, own in zip(logprobs, mask, strict=True) if own)
    assert len(logged(trainer, "sampling/importance_sampling_ratio/mean")) == 2
    loads = 2 if mode.get("vllm_enable_sleep_mode") else 1  # of an engine that slept, which TRL and we both wake
    assert engine.events.count("reset") == 2 * loads
    requested = server.completions if mode["vllm_mode"] == "server" else engine.requested
    assert {options["max_tokens"] for options in requested} == {4}  # a turn's, not a rollout's
