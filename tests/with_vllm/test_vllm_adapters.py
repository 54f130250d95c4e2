"""Adapters alone on a real vLLM server: they are sampled from exactly, and no other weights are sent."""

from __future__ import annotations

import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from cpu_support import CPUGeneration, Server, saved_policy, served
from games import Snapshots
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_vllm_ahead import GAME, NUM_STEPS, gaps, trainer_of
from test_vllm_training import EXACT, after, gap, generation_of, played
from trl.trainer import grpo_trainer

from agentsgym.agents.vllm.policy import VLLMPolicyAgent
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.store.reader import RolloutStore

LORA: dict[str, Any] = {"r": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_policy(GAME, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def lora_server(model_folder: Path) -> Generator[Server]:
    with served(model_folder, enable_lora=True, max_lora_rank=8, max_loras=2) as started:
        yield started


@pytest.fixture
def server(lora_server: Server, model_folder: Path) -> Generator[Server]:
    """The server, which is left with the weights of its start."""
    yield lora_server
    if not version_of(lora_server).startswith("agentsgym-adapters-"):
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(model_folder)}}
        requests.post(f"{lora_server.url}/collective_rpc", json=call).raise_for_status()
        requests.post(f"{lora_server.url}/reset_prefix_cache").raise_for_status()
        requests.post(f"{lora_server.url}/update_weight_version", json={"new_version": "default"}).raise_for_status()


def version_of(server: Server) -> str:
    return requests.get(f"{server.url}/weight_info").json()["weight_version"]


def agent_of(model_folder: Path, server: Server, **changes: Any) -> Any:
    generation = generation_of(model_folder, mode="server", server_base_url=server.url)
    generation.model = get_peft_model(generation.model, LoraConfig(**{**LORA, **changes}))  # type: ignore[arg-type]
    return VLLMPolicyAgent(generation, generation.processing_class, max_turn_tokens=8)  # type: ignore[arg-type]


def train_adapters(agent: Any) -> None:
    for parameter in agent.generation.model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)


def gap_now(agent: Any) -> float:
    return gap(agent, played(agent)).largest_gap


def test_each_version_is_sampled_at_once_and_nothing_else_is_sent(model_folder: Path, server: Server) -> None:
    agent = agent_of(model_folder, server)
    versions, adapters = list[str](), [one for one in agent.generation.model.parameters() if one.requires_grad]
    for step in range(4):
        agent.prepare(after(step))
        assert gap_now(agent) < EXACT  # of the same prompts each time, which the server keeps in its prefix cache
        versions.append(version_of(server))
        folder = agent._weights._adapters.folder
        assert folder.name == versions[-1]
        sent = load_file(folder / "adapter_model.safetensors").values()
        assert sum(one.nbytes for one in sent) == sum(one.nbytes for one in adapters)
        train_adapters(agent)
        assert gap_now(agent) > 0.05
    assert len(set(versions)) == 4
    listed = requests.get(f"{server.url}/v1/models").json()["data"]
    assert [one["id"] for one in listed[1:]] == versions[-2:]  # earlier ones are unloaded, and their folders deleted
    assert {one.name for one in folder.parent.iterdir()} == set(versions[-2:])
    server.end(signal.SIGKILL)
    server.start()
    agent.prepare(after(3))
    assert gap_now(agent) < EXACT
    assert agent.generation.num_syncs == 0
    agent.finish()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"r": 9}, "LoRA rank 9 is greater than max_lora_rank 8"),
        ({"use_dora": True}, "not all servers follow use_dora=True"),
        ({"bias": "lora_only"}, "not all servers follow bias='lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "not all servers follow modules_to_save=['lm_head']"),
        ({"rank_pattern": {"q_proj": 4}}, "not all servers follow rank_pattern={'q_proj': 4}"),
        ({"target_modules": ["lm_head"]}, "lm_head.lora_A.default.weight is trained, too"),
        ("weights", "log-probabilities without adapters differ from"),
        ("folder", "it cannot load /nowhere (status 404: Loading lora nowhere failed: No adapter found"),
    ],
)
def test_other_runs_send_merged_weights_and_the_log_has_the_reason(
    changes: Any, sentence: str, model_folder: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    agent = agent_of(model_folder, server, **(changes if isinstance(changes, dict) else {}))
    if changes == "weights":
        agent.generation.model.get_input_embeddings().weight.data *= 1.5
    if changes == "folder":
        agent._weights._adapters.write = lambda _: None
        agent._weights._adapters.folder = Path("/nowhere")
    train_adapters(agent)
    agent.prepare(after(0))
    assert gap_now(agent) < EXACT
    agent.finish()
    assert agent.generation.num_syncs == 1
    assert caplog.text.count("gets merged weights instead of adapters: ") == 1
    assert sentence in caplog.text


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_every_turn_of_a_run_has_the_log_probabilities_of_its_version(
    max_staleness: int, model_folder: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", CPUGeneration)
    options: dict[str, Any] = {"peft_config": LoraConfig(**LORA), "max_staleness": max_staleness}
    trainer = trainer_of(TwentyQuestionsEnv, model_folder, tmp_path, [server], **options)
    base = {name: one.clone() for name, one in trainer.model.state_dict().items() if ".lora_" not in name}
    snapshots = Snapshots(trainer.model)
    trainer.add_callback(snapshots)
    trainer.train()
    assert trainer.vllm_generation.num_syncs == 0
    assert all(torch.equal(one, trainer.model.state_dict()[name]) for name, one in base.items())
    records = [*RolloutStore(tmp_path / "rollouts").records()]
    ages = {one.step - turn.policy_version for one in records for turn in one.trajectory.turns}
    assert max(ages) <= max_staleness
    assert (max(ages) > 0) == (max_staleness > 0)
    assert max(gaps(records, trainer.model.eval(), snapshots.weights)) < EXACT
    assert max(snapshots.weights) == NUM_STEPS
