"""The policy in training on a real vLLM: what it samples is exact, and what it learns from is what it sampled."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from bare_trials import drive
from cpu_support import CPUGeneration, saved_policy, served
from datasets import Dataset
from programs import speak
from torch import multiprocessing
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer import grpo_trainer

from agentsgym.agents.trained import BatchStart
from agentsgym.agents.vllm.policy import VLLMPolicyAgent
from agentsgym.envs.AgentProgram import AgentProgramEnv
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, TwentyQuestionsEnv
from agentsgym.errors import AgentError
from agentsgym.record_audit import audit
from agentsgym.training.config import GRPOEnvConfig
from agentsgym.training.drift import Drift, logprob_gap
from agentsgym.training.trainer import GRPOEnvTrainer
from agentsgym.types import Action, Trajectory, TurnRequest

GAME = {
    "objects": list(DEMO_OBJECTS),
    "properties": list(DEMO_PROPERTIES),
    "max_steps_per_episode": 6,
    "error_allowance": 2,  # most games of a policy that knows nothing end early, some go on
}
TASKS = [{"solution": name, "seed": 0} for name in DEMO_OBJECTS[:4]]
TEMPERATURE = 1.3
EXACT = 1e-4
CONTEXT = 512  # tokens


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The game's own tiny policy."""
    return saved_policy(GAME, tmp_path_factory.mktemp("policy"))


def generation_of(model_folder: Path, **options: Any) -> CPUGeneration:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    return CPUGeneration(model, Accelerator(cpu=True), tokenizer, temperature=TEMPERATURE, **options)


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Generator[str]:
    with served(model_folder, max_model_length=CONTEXT) as started:
        yield started.url


@pytest.fixture(scope="module")
def colocated(model_folder: Path) -> CPUGeneration:
    return generation_of(model_folder, max_model_length=CONTEXT, max_num_seqs=32)


@pytest.fixture(scope="module")
def remote(model_folder: Path, server: str) -> CPUGeneration:
    return generation_of(model_folder, mode="server", server_base_url=server)


@pytest.fixture(params=["colocated", "remote"])
def engine(request: pytest.FixtureRequest) -> CPUGeneration:
    engine = request.getfixturevalue(request.param)
    engine.generation_kwargs = {}
    return engine


@pytest.fixture
def agent(engine: CPUGeneration) -> Generator[VLLMPolicyAgent]:
    agent = VLLMPolicyAgent(engine, engine.processing_class, max_turn_tokens=8)
    yield agent
    agent.finish()


def played(agent: VLLMPolicyAgent, num_rollouts: int = 4) -> list[Trajectory]:
    return TwentyQuestionsEnv(agent.tokenizer, GAME).rollout(TASKS, agent, num_rollouts=num_rollouts)


def gap(agent: VLLMPolicyAgent, trajectories: Sequence[Trajectory]) -> Drift:
    return logprob_gap(agent.generation.model, trajectories, temperature=TEMPERATURE)


def after(step: int) -> BatchStart:
    """The start of a generation batch after so many optimizer steps."""
    return BatchStart(seed_parts=(), session_ids=(), first_session=0, step=step)


def optimizer_step(agent: VLLMPolicyAgent) -> None:
    model = agent.generation.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.tensor([agent.tokenizer("Is it alive?").input_ids])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_rollouts_are_exact_and_carry_the_models_own_logprobs(agent: VLLMPolicyAgent) -> None:
    agent.prepare(after(0))
    trajectories = played(agent)

    assert audit(trajectories).problems == ()
    assert all(trajectory.exact and not trajectory.failed for trajectory in trajectories)
    for trajectory in trajectories:
        for turn in trajectory.turns:
            output = list(trajectory.token_ids[turn.start : turn.stop])
            ended = output[-1] in agent.stop_token_ids
            assert ended or len(output) == agent.max_turn_tokens
            text = agent.tokenizer.decode(output[:-1] if ended else output, skip_special_tokens=True)
            assert trajectory.messages[turn.message_index]["content"] == text
    assert {len(trajectory.turns) for trajectory in trajectories} != {1}
    drift = gap(agent, trajectories)
    assert drift.num_tokens == sum(sum(trajectory.agent_token_mask) for trajectory in trajectories)
    assert drift.largest_gap < EXACT


def test_the_calls_of_programs_are_answered_exactly(agent: VLLMPolicyAgent) -> None:
    def converse(task: Any, endpoint: Any) -> float:
        messages: list[Any] = []
        for text in (f"Think of {task['solution']}.", "Is it alive?", "Is it a clock?"):
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": speak(endpoint, messages)[1]})
        return 1.0

    agent.prepare(after(0))
    trajectories = AgentProgramEnv(agent.tokenizer, program=converse).rollout(TASKS, agent, num_rollouts=2)
    assert audit(trajectories).problems == ()
    assert [(len(one.turns), one.failed, one.final_reward) for one in trajectories] == [(3, False, 1.0)] * 8
    assert {one.info["num_conversations"] for one in trajectories} == {1}
    assert gap(agent, trajectories).largest_gap < EXACT


def test_rollouts_of_one_task_differ(agent: VLLMPolicyAgent) -> None:
    agent.prepare(after(0))
    rollouts = played(agent)[:4]
    assert len({tuple(trajectory.token_ids) for trajectory in rollouts}) == len(rollouts)


def test_the_engine_follows_the_weights_when_a_rollout_begins_and_not_before(agent: VLLMPolicyAgent) -> None:
    agent.prepare(after(0))
    optimizer_step(agent)
    assert gap(agent, played(agent)).largest_gap > 0.05
    agent.prepare(after(1))
    assert gap(agent, played(agent)).largest_gap < EXACT


def one_turn(agent: VLLMPolicyAgent, requests: Sequence[TurnRequest]) -> list[Action]:
    actions = list(agent.act(requests))
    assert all(isinstance(action, Action) for action in actions)
    return actions  # pyright: ignore[reportReturnType]


def queries(agent: VLLMPolicyAgent, rooms: Sequence[int]) -> list[TurnRequest]:
    prompt = agent.tokenizer("Is it alive?").input_ids
    return [TurnRequest(session_id="", messages=[], token_ids=prompt, max_new_tokens=room) for room in rooms]


def test_each_row_keeps_its_own_budget(agent: VLLMPolicyAgent) -> None:
    rooms = [1, 2, 200, 3] * 8
    actions = one_turn(agent, queries(agent, rooms))
    for action, room in zip(actions, rooms, strict=True):
        ended = action.token_ids[-1] in agent.stop_token_ids
        assert action.finish_reason == ("stop" if ended else "length")
        assert len(action.token_ids) == len(action.logprobs)
        assert not agent.stop_token_ids & set(action.token_ids[:-1])
        assert len(action.token_ids) <= room if ended else len(action.token_ids) == room
    assert max(len(action.token_ids) for action in actions) > 3
    assert {action.finish_reason for action in actions} == {"stop", "length"}


def test_a_stop_string_ends_a_turn_and_its_tokens_are_kept(engine: CPUGeneration) -> None:
    engine.generation_kwargs = {"stop": [" it"]}
    agent = VLLMPolicyAgent(engine, engine.processing_class, max_turn_tokens=200)
    actions = one_turn(agent, queries(agent, [200] * 16))
    agent.finish()
    stopped = [
        action
        for action in actions
        if action.finish_reason == "stop" and action.token_ids[-1] not in agent.stop_token_ids
    ]
    assert stopped
    for action in stopped:
        whole = agent.tokenizer.decode(action.token_ids, skip_special_tokens=True)
        assert " it" not in action.text
        assert whole.startswith(f"{action.text} it")
    cut = [action for action in actions if action.finish_reason == "length"]
    assert all(len(action.token_ids) == 200 and " it" not in action.text for action in cut)


def test_a_prompt_beyond_the_context_fails_its_own_session_alone(agent: VLLMPolicyAgent) -> None:
    def session(length: int) -> Generator[TurnRequest, Action, str]:
        try:
            yield TurnRequest(session_id="", messages=[], token_ids=[5] * length, max_new_tokens=2)
        except AgentError as fault:
            return str(fault)
        return "answered"

    agent.prepare(after(0))
    results = drive([session(length) for length in (10, 20, CONTEXT + 1, 30)], agent)

    assert [result == "answered" for result in results] == [True, True, False, True]
    assert "maximum context length" in results[2]
    assert drive([session(10)], agent) == ["answered"]


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_training_learns_from_what_vllm_sampled(
    mode: str, model_folder: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", CPUGeneration)
    options = at_server(server, {"vllm_mode": mode, "vllm_max_model_length": CONTEXT})
    trainer = trainer_of(model_folder, tmp_path, **options)

    trainer.train()

    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == trainer.args.max_steps
    assert all(log["sampling/sampling_logp_difference/max"] < EXACT for log in logs)
    assert all(log["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=EXACT) for log in logs)
    assert all(log["exact"] == 1.0 and log["failed"] == 0.0 for log in logs)
    assert trainer.vllm_generation.num_syncs == trainer.args.max_steps
    before = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    moved = [(before[name] - tensor).abs().max() for name, tensor in trainer.model.state_dict().items()]
    assert max(moved) > 1e-2


def test_training_on_an_engine_left_behind_shows_in_the_log(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", CPUGeneration)
    monkeypatch.setattr(CPUGeneration, "sync_weights", lambda self: None)
    trainer = trainer_of(model_folder, tmp_path, vllm_mode="colocate", vllm_max_model_length=CONTEXT)
    trainer.train()
    gaps = [log["sampling/sampling_logp_difference/max"] for log in trainer.state.log_history if "loss" in log]
    assert gaps[0] < EXACT < 0.05 < gaps[-1]


def train_on_rank(rank: int, port: int, model_folder: Path, folder: Path, options: dict[str, Any]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    grpo_trainer.VLLMGeneration = CPUGeneration
    trainer = trainer_of(model_folder, folder, per_device_train_batch_size=8, **options)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    torch.save({"logs": logs, "weights": weights}, folder / f"{rank}.pt")
    # The process group is left to vLLM, which ends its own groups with it.


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"vllm_mode": "server"}, id="one_server"),
        pytest.param({"vllm_mode": "colocate", "vllm_tensor_parallel_size": 2}, id="one_engine_in_parallel"),
        pytest.param({"vllm_mode": "colocate"}, id="an_engine_each"),
    ],
)
def test_two_ranks_learn_together(options: dict[str, Any], model_folder: Path, server: str, tmp_path: Path) -> None:
    options = at_server(server, options | {"vllm_max_model_length": CONTEXT})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks: Any = multiprocessing.start_processes(
        train_on_rank, args=(port, model_folder, tmp_path, options), nprocs=2, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + 600
    while not ranks.join(timeout=5):
        if time.monotonic() > deadline:
            for process in ranks.processes:
                process.kill()
            pytest.fail("the ranks lost step: they wait for each other")

    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert len(first["logs"]) == 3
    assert all(log["sampling/sampling_logp_difference/max"] < EXACT for log in first["logs"])
    assert all(log["exact"] == 1.0 and log["failed"] == 0.0 for log in first["logs"])
    assert any(log["turns/min"] != log["turns/max"] for log in first["logs"])
    before = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    assert all(torch.equal(tensor, second["weights"][name]) for name, tensor in first["weights"].items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in first["weights"].items())


def at_server(url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Add the server's URL to options that use a server; a colocated engine refuses it."""
    return options | ({"vllm_server_base_url": url} if options["vllm_mode"] == "server" else {})


def trainer_of(model_folder: Path, folder: Path, **changes: Any) -> GRPOEnvTrainer:
    values = {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": 3,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_turn_tokens": 8,
        "max_completion_length": 300,
        "learning_rate": 1e-2,
        "temperature": TEMPERATURE,
        "use_vllm": True,
    }
    args = GRPOEnvConfig(**{**values, **changes})
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    env = TwentyQuestionsEnv(AutoTokenizer.from_pretrained(model_folder), GAME)
    dataset = Dataset.from_list([{"task_data": task} for task in TASKS])
    return GRPOEnvTrainer(model, env, args, train_dataset=dataset)
