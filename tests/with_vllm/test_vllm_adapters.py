"""Adapters alone on a real vLLM server: they are sampled from exactly, and no other weights are sent."""

from __future__ import annotations

import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from accelerate import Accelerator
from cpu_support import CPUGeneration, Server, saved_policy, served
from datasets import Dataset
from games import Snapshots
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer import grpo_trainer

from agentsgym.agents.trained import BatchStart
from agentsgym.agents.vllm.policy import VLLMPolicyAgent
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, TwentyQuestionsEnv
from agentsgym.store.reader import RolloutStore
from agentsgym.training.config import GRPOEnvConfig
from agentsgym.training.drift import logprob_gap
from agentsgym.training.trainer import GRPOEnvTrainer

GAME = {"objects": list(DEMO_OBJECTS), "properties": list(DEMO_PROPERTIES), "max_steps_per_episode": 6}
TASKS = [{"solution": name, "seed": 0} for name in DEMO_OBJECTS[:4]]
TEMPERATURE = 1.3
EXACT = 1e-4
LORA: dict[str, Any] = {"r": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_policy(GAME, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Generator[Server]:
    with served(model_folder, enable_lora=True, max_lora_rank=8, max_loras=2) as started:
        yield started


@pytest.fixture(autouse=True)
def untouched(server: Server, model_folder: Path) -> Generator[None]:
    """Leave the server with the weights of its start."""
    yield
    if not weight_version(server).startswith("agentsgym-adapters-"):
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(model_folder)}}
        requests.post(f"{server.url}/collective_rpc", json=call).raise_for_status()
        requests.post(f"{server.url}/reset_prefix_cache").raise_for_status()
        requests.post(f"{server.url}/update_weight_version", json={"new_version": "default"}).raise_for_status()


def weight_version(server: Server) -> str:
    return requests.get(f"{server.url}/weight_info").json()["weight_version"]


def agent_of(model_folder: Path, server: Server, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), LoraConfig(**{**LORA, **changes}))
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    options: dict[str, Any] = {"mode": "server", "server_base_url": server.url, "temperature": TEMPERATURE}
    generation = CPUGeneration(model, Accelerator(cpu=True), tokenizer, **options)
    return VLLMPolicyAgent(generation, tokenizer, max_turn_tokens=8)  # type: ignore[arg-type]


def prepare(agent: Any, step: int) -> None:
    agent.prepare(BatchStart(seed_parts=(), session_ids=(), first_session=0, step=step))


def gap(agent: Any) -> float:
    """How far what is sampled now is from the model with its adapters."""
    trajectories = TwentyQuestionsEnv(agent.tokenizer, GAME).rollout(TASKS, agent, num_rollouts=4)
    assert not any(one.failed for one in trajectories)
    return logprob_gap(agent.generation.model, trajectories, temperature=TEMPERATURE).largest_gap


def train_adapters(agent: Any) -> None:
    with torch.no_grad():
        for name, parameter in agent.generation.model.named_parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)


def test_each_version_is_sampled_at_once_and_nothing_else_is_sent(model_folder: Path, server: Server) -> None:
    agent = agent_of(model_folder, server)
    model, versions = agent.generation.model, list[str]()
    for step in range(4):
        prepare(agent, step)
        assert gap(agent) < EXACT  # of the same prompts each time, which the server keeps in its prefix cache
        versions.append(weight_version(server))
        (folder,) = agent._weights._adapters._root.glob(versions[-1])
        sent = load_file(folder / "adapter_model.safetensors")
        adapters = [one for one in model.parameters() if one.requires_grad]
        assert sum(one.nbytes for one in sent.values()) == sum(one.nbytes for one in adapters)
        train_adapters(agent)
        assert gap(agent) > 0.05
    listed = [one["id"] for one in requests.get(f"{server.url}/v1/models").json()["data"]]
    assert len(set(versions)) == 4
    assert listed[1:] == versions[-2:]  # those before are unloaded, and their folders deleted
    assert {one.name for one in folder.parent.iterdir()} == set(versions[-2:])
    assert agent.generation.num_syncs == 0
    server.end(signal.SIGKILL)
    server.start()
    prepare(agent, 3)
    assert gap(agent) < EXACT
    assert (agent.generation.num_syncs, weight_version(server)) == (0, agent._weights._adapters.folder.name)
    agent.finish()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"r": 9}, "its --max-lora-rank is below 9"),
        ({"use_dora": True}, "not all servers follow use_dora=True"),
        ({"bias": "lora_only"}, "not all servers follow bias='lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "not all servers follow modules_to_save=['lm_head']"),
        ({"rank_pattern": {"q_proj": 4}}, "not all servers follow rank_pattern={'q_proj': 4}"),
        ({"target_modules": ["lm_head"]}, "lm_head.lora_A.default.weight is trained, too"),
        ("other weights", "its weights are not the run's: log-probabilities differ by"),
        ("no folder", "it cannot load "),
        ("replaced weights", "its own weights were replaced (their version is 'somebody')"),
    ],
)
def test_servers_that_cannot_have_the_model_by_adapters_get_merged_weights_and_the_log_says_why(
    changes: Any, sentence: str, model_folder: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    agent = agent_of(model_folder, server, **(changes if isinstance(changes, dict) else {}))
    if changes == "other weights":
        agent.generation.model.get_input_embeddings().weight.data *= 1.5
    elif changes == "no folder":
        agent._weights._adapters.write = lambda in_use: None
        agent._weights._adapters.folder = Path("/nowhere")
    elif changes == "replaced weights":
        requests.post(f"{server.url}/update_weight_version", json={"new_version": "somebody"}).raise_for_status()
    train_adapters(agent)
    for step in range(2):
        prepare(agent, step)
        assert gap(agent) < EXACT
    agent.finish()
    assert agent.generation.num_syncs == 2
    reported = [one.getMessage() for one in caplog.records if "merged weights" in one.getMessage()]
    assert len(reported) == 1
    assert sentence in reported[0]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_every_turn_of_a_run_has_the_log_probabilities_of_its_version(
    max_staleness: int, model_folder: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", CPUGeneration)
    args = GRPOEnvConfig(
        output_dir=str(tmp_path),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        max_steps=5,
        per_device_train_batch_size=16,
        num_generations=4,
        max_turn_tokens=8,
        max_completion_length=300,
        learning_rate=3e-2,
        temperature=TEMPERATURE,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=server.url,
        store_rollouts=str(tmp_path / "rollouts"),
        max_staleness=max_staleness,
    )
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    env = TwentyQuestionsEnv(AutoTokenizer.from_pretrained(model_folder), GAME)
    rows = Dataset.from_list([{"task_data": {"solution": name, "seed": 0}} for name in DEMO_OBJECTS[:8]])
    trainer = GRPOEnvTrainer(model, env, args, train_dataset=rows, peft_config=LoraConfig(**LORA))
    snapshots = Snapshots(trainer.model)
    trainer.add_callback(snapshots)
    trainer.train()

    assert trainer.vllm_generation.num_syncs == 0
    original = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    base = {name: one for name, one in trainer.model.get_base_model().state_dict().items() if ".lora_" not in name}
    assert all(torch.equal(one, original[name.replace(".base_layer", "")]) for name, one in base.items())
    records = [*RolloutStore(tmp_path / "rollouts").records()]
    ages = {one.step - turn.policy_version for one in records for turn in one.trajectory.turns}
    assert max(ages) <= max_staleness
    assert (max(ages) > 0) == (max_staleness > 0)
    for one in records:
        ids = torch.tensor([one.trajectory.token_ids])
        for turn in one.trajectory.turns:
            trainer.model.load_state_dict(snapshots.weights[turn.policy_version])
            with torch.no_grad():
                table = (trainer.model(ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            own = table.gather(1, ids[0, 1:, None])[turn.start - 1 : turn.stop - 1, 0]
            torch.testing.assert_close(own, torch.tensor(one.trajectory.logprobs[turn.start : turn.stop]), atol=EXACT, rtol=0)
