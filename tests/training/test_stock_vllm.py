"""TRL's own trainer with our rollout function through its vLLM engines, of which vLLM itself is scripted."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl.generation.vllm_generation as trl_vllm
import trl.trainer.grpo_trainer as trl_trainer
from games import NUMBERS, logged, policy
from stock import Recorded, stock_trainer
from vllm_engines import Engine, ScriptedGeneration
from vllm_stub import stub_server


class Served(Engine):
    """Says a number, another one each time."""

    def __init__(self) -> None:
        tokenizer: Any = policy()[1]
        rng = random.Random(0)
        numbers = [tokenizer.encode(f" {number}", add_special_tokens=False) for number in NUMBERS]
        super().__init__(lambda _: [*rng.choice(numbers), tokenizer.eos_token_id])


class Generation(ScriptedGeneration):
    """As TRL builds it."""

    def __init__(self, **options: Any) -> None:
        self.engine, self.breaks = Served(), None
        super(ScriptedGeneration, self).__init__(**options)


@pytest.mark.parametrize(
    "mode",
    [
        {"vllm_mode": "colocate"},
        {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True},
        {"vllm_mode": "server"},
    ],
    ids=["colocate", "sleeping", "server"],
)
@pytest.mark.parametrize("by_turn", [False, True], ids=["final", "turn"])
def test_rollouts_go_through_trls_engine(
    mode: dict[str, Any], by_turn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(trl_trainer, "VLLMGeneration", Generation)
    monkeypatch.setattr(trl_vllm, "SamplingParams", SimpleNamespace, raising=False)
    changes: dict[str, Any] = {"rollouts": {"credit": "turn", "rollouts_per_group": 2}, "scale_rewards": "none"}
    with stub_server(Served().script) as server:
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
    asked = server.completions if mode["vllm_mode"] == "server" else engine.asked
    assert {options["max_tokens"] for options in asked} == {4}  # a turn's, not a rollout's
