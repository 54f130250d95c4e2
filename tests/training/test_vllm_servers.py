from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.trainer.grpo_trainer as trl_trainer
from accelerate import Accelerator
from accelerate.utils import DistributedType
from games import GuessNumber, trainer_of
from peft import LoraConfig, get_peft_model
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from vllm_engines import (
    BuiltGeneration,
    Engine,
    ScriptedGeneration,
    agent_of,
    play,
    ready,
    scripted,
    started,
    wait_less,
)
from vllm_stub import StubServer, stub_server, stub_servers

from agentsgym import Action, AgentsGymError, ConfigError, GRPOEnvConfig, TurnRequest
from agentsgym.agents.vllm.policy import VLLMPolicyAgent
from agentsgym.types import StopReason


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_less(monkeypatch)


@pytest.fixture
def servers() -> Iterator[list[StubServer]]:
    with stub_servers(scripted) as made:
        yield made


@pytest.fixture
def server(servers: list[StubServer]) -> StubServer:
    return servers[0]


def pushes(agent: Any) -> list[str]:
    return [event[1] for event in agent.generation.engine.events if event[0] == "push"]


def test_each_turn_is_one_request_of_the_recorded_ids(server: StubServer) -> None:
    agent = ready(server, stop=["stop"])
    played = play(agent)
    assert all(one["output"] == one["wanted"] and one["fault"] is None for one in played)
    assert len(server.completions) == 6 * 3
    requested = server.completions[0]
    assert (requested["model"], requested["stop"], requested["logprobs"], requested["return_token_ids"]) == (
        "tiny",
        ["stop"],
        0,
        True,
    )
    assert requested["temperature"] == 1.0


def test_many_requests_are_open_at_once_and_a_slow_one_holds_up_nobody(server: StubServer) -> None:
    server.seconds = 0.3
    agent = ready(server)
    begin = time.monotonic()
    play(agent, num_sessions=100, num_turns=2)
    assert server.most_open == 100
    assert time.monotonic() - begin < 100 * 0.3  # one after the other it would be twice that


def test_log_probabilities_that_the_server_does_not_know_are_no_numbers(server: StubServer) -> None:
    agent = ready(server)
    answer = server._answer({"prompt": [5], "stop_token_ids": [2], "max_tokens": 9})
    answer["choices"][0]["logprobs"]["token_logprobs"][0] = -9999.0
    server.faults.append(answer)
    (action,) = agent.act([TurnRequest(session_id="", messages=[], token_ids=[5])])
    agent.finish()
    assert math.isnan(action.logprobs[0])
    assert action.logprobs[1:] == [-0.5] * (len(scripted([5])) - 1)


def test_a_session_stays_with_its_server_and_servers_share_the_sessions(servers: list[StubServer]) -> None:
    agent = ready(*servers)
    assert all(one["fault"] is None for one in play(agent, num_sessions=10, num_turns=4))
    firsts = [{requested["prompt"][0] for requested in server.completions} for server in servers]
    assert [len(first) for first in firsts] == [5, 5]
    assert not firsts[0] & firsts[1]


def test_each_server_gets_the_weights_once_a_step_over_a_port_of_its_own(servers: list[StubServer]) -> None:
    agent = agent_of(*servers)
    urls = [server.url for server in servers]
    for step, num in [(0, 1), (0, 1), (1, 2), (1, 2)]:
        agent.prepare(started(step))
        assert pushes(agent) == urls * num
    agent.weights_changed()
    agent.prepare(started(1))
    assert pushes(agent) == urls * 3
    connects = [event[1:] for event in agent.generation.engine.events if event[0] == "connect"]
    assert connects == [(urls[1], 51217)]  # TRL connected the first itself
    marks = {server.version for server in servers}
    assert len(marks) == 2
    assert "default" not in marks


def test_weights_that_trl_has_pushed_are_not_pushed_again(server: StubServer) -> None:
    agent = agent_of(server)
    agent.weights_loaded(3)
    agent.prepare(started(3))
    assert pushes(agent) == []


@pytest.mark.parametrize("fault", [500, 503, 429, "hang up"])
def test_what_may_pass_is_tried_again_once_more(server: StubServer, fault: Any) -> None:
    agent = ready(server)
    server.faults.extend([fault, fault])
    played = play(agent)
    assert all(one["fault"] is None and one["output"] == one["wanted"] for one in played)
    assert len(server.completions) == 6 * 3 + 2


def test_a_request_that_is_refused_fails_its_own_session_in_the_servers_words(server: StubServer) -> None:
    agent = ready(server)
    server.faults.append(400)
    faults = [one["fault"] for one in play(agent) if one["fault"]]
    assert len(faults) == 1
    assert f"the vLLM server at {server.url} refused a request: status 400: scripted 400" in faults[0]
    assert len(server.completions) == 5 * 3 + 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt_token_ids": [4]}, "responded to a different prompt from the one that was sent"),
        ({"token_ids": None}, "is malformed"),
        ({"finish_reason": "error"}, "is malformed"),
    ],
)
def test_an_answer_that_makes_no_sense_fails_its_turn(server: StubServer, change: Any, sentence: str) -> None:
    agent = ready(server)
    answer = server._answer({"prompt": [5], "stop_token_ids": [2], "max_tokens": 9})
    answer["choices"][0].update(change)
    server.faults.append(answer)
    assert sentence in str(agent.act([TurnRequest(session_id="", messages=[], token_ids=[5])])[0])
    agent.finish()


def test_a_server_that_dies_leaves_its_sessions_to_the_others(servers: list[StubServer]) -> None:
    servers[0].seconds = servers[1].seconds = 0.1
    agent = ready(*servers)
    killer = threading.Timer(0.25, servers[0].stop)
    killer.start()
    played = play(agent, num_sessions=8, num_turns=8)
    assert all(one["fault"] is None and one["output"] == one["wanted"] for one in played)
    assert servers[0].completions
    killer.join()


def test_without_another_server_the_sessions_fail_by_name_of_the_cause(server: StubServer) -> None:
    server.seconds = 0.1
    agent = ready(server)
    killer = threading.Timer(0.25, server.stop)
    killer.start()
    begin = time.monotonic()
    faults = [one["fault"] for one in play(agent, num_turns=20)]
    assert all(f"no vLLM server is left ({server.url}: it is gone (ClientConnectorError" in fault for fault in faults)
    assert time.monotonic() - begin < 10
    killer.join()


def test_a_server_that_hangs_is_given_up(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentsgym.agents.vllm.server.ANSWER_S", 0.1)
    agent = ready(server)
    server.faults.append("hang")
    server.hangs.add("/weight_info")
    (one,) = play(agent, num_sessions=1)
    assert "it did not respond 2 times in a row (it did not respond in time)" in one["fault"]


def test_a_server_that_comes_back_with_other_weights_is_not_called_until_it_has_them(server: StubServer) -> None:
    agent = ready(server)
    assert play(agent)[0]["fault"] is None
    server.stop()
    server.start()
    server.faults.append("hang up")
    assert any("it was restarted" in (one["fault"] or "") for one in play(agent))
    agent.prepare(started(0))  # the step is the same
    assert pushes(agent) == [server.url] * 2
    assert [event[0] for event in agent.generation.engine.events if event[0] in ("connect", "disconnect")] == [
        "disconnect",
        "connect",
    ]
    assert all(one["fault"] is None for one in play(agent))


def test_a_server_that_is_not_there_is_waited_for(server: StubServer) -> None:
    agent = ready(server)
    server.stop()
    starter = threading.Timer(0.5, server.start)
    starter.start()
    agent.prepare(started(1))
    assert pushes(agent) == [server.url] * 2
    starter.join()


def test_a_server_that_stays_away_ends_the_run_with_its_name(server: StubServer) -> None:
    agent = agent_of(server)
    agent.generation.server_timeout = 0.2
    server.stop()
    with pytest.raises(
        AgentsGymError, match=r"within vllm_server_timeout = 0.2 s.*resume the run from its last checkpoint"
    ):
        agent.prepare(started(0))


def test_one_of_several_servers_may_stay_away_and_come_back(servers: list[StubServer]) -> None:
    agent = ready(*servers)
    servers[1].stop()
    agent.prepare(started(1))
    assert all(one["fault"] is None for one in play(agent))
    servers[1].start()
    agent.prepare(started(2))
    assert pushes(agent)[3:] == [server.url for server in servers]
    servers[0].completions.clear()
    play(agent)
    assert {len(server.completions) for server in servers} == {9}


def test_a_push_that_hangs_ends_the_run_with_the_cause(
    server: StubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentsgym.agents.vllm.weights.PUSH_LIMIT_S", 0.2)
    agent = agent_of(server)
    agent.generation.sync_weights = lambda: time.sleep(2)
    with pytest.raises(
        AgentsGymError, match=rf"vLLM server at {server.url} did not finish within 0.2 s: the server hangs"
    ):
        agent.prepare(started(0))
    assert "did not finish within 0.2 s" in caplog.text


def test_a_push_that_fails_names_server_and_cause_and_is_tried_again(server: StubServer) -> None:
    agent = agent_of(server)
    sync, agent.generation.sync_weights = agent.generation.sync_weights, lambda: 1 / 0
    with pytest.raises(AgentsGymError, match=rf"pushed to the vLLM server at {server.url}: ZeroDivisionError"):
        agent.prepare(started(0))
    agent.generation.sync_weights = sync
    agent.prepare(started(0))
    assert pushes(agent) == [server.url]


def test_a_server_with_another_tokenizer_is_refused(server: StubServer) -> None:
    server.encode = lambda text: [1, 2, 3]
    agent = agent_of(server)
    with pytest.raises(
        ConfigError, match=r"'org/tiny' with a tokenizer that differs from the trainer's: it .* as \[1, 2"
    ):
        agent.prepare(started(0))
    assert pushes(agent) == []
    tokenizer = agent.tokenizer
    server.encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    agent.prepare(started(0))
    assert pushes(agent) == [server.url]


def test_a_server_with_another_model_or_a_smaller_context_is_warned_of(
    server: StubServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.context = 60
    agent = agent_of(server)
    agent.generation.model.config.name_or_path = "org/other"
    with caplog.at_level(logging.WARNING):
        agent.prepare(started(0))
    assert "was started with 'org/tiny', but this run trains 'org/other'" in caplog.text
    assert "context of 60 tokens, where episodes end with max_tokens: max_completion_length=100 allows" in caplog.text
    fine, none_left = agent.act(
        [TurnRequest(session_id="", messages=[], token_ids=[5] * length) for length in (10, 60)]
    )
    agent.finish()
    assert isinstance(fine, Action)
    assert f"the maximum context length of the vLLM server at {server.url} (60 tokens)" in str(none_left)


def test_an_episode_ends_where_the_context_of_its_server_does(server: StubServer) -> None:
    server.context = 60
    agent = ready(server)
    games = [{"seed": seed, "secret": 6} for seed in range(4)]  # 6 is no number
    played = GuessNumber(agent.tokenizer, {"max_steps_per_episode": 50}).rollout(games, agent)
    assert {one.stop_reason for one in played} == {StopReason.MAX_TOKENS}
    assert max(len(one.token_ids) for one in played) <= 60


def test_a_server_whose_context_is_longer_than_the_rope_is_fixed_is_refused(server: StubServer) -> None:
    agent = agent_of(server)
    config = agent.generation.model.config
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config.max_position_embeddings = server.context - 1
    with pytest.raises(ConfigError, match=rf"start the server with --max-model-len {server.context - 1}$"):
        agent.prepare(started(0))
    config.max_position_embeddings = server.context
    agent.prepare(started(0))


def test_a_server_that_knows_no_marks_is_used_too() -> None:
    with stub_server(scripted, knows_marks=False) as server:
        agent = ready(server)
        server.faults.append("hang up")
        assert all(one["fault"] is None for one in play(agent))
        server.stop()
        assert all(one["fault"] for one in play(agent))
        server.start()
        agent.prepare(started(0))
        assert pushes(agent) == [server.url] * 2
        assert all(one["fault"] is None for one in play(agent))


def test_an_interrupted_rollout_hangs_up_on_its_server(server: StubServer) -> None:
    server.seconds = 30
    agent = ready(server)
    looks = iter([*range(20)])

    def interrupt() -> None:
        if next(looks, None) is None or server.num_open == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(agent, num_sessions=2, interrupt=interrupt)
    deadline = time.monotonic() + 5
    while server.num_open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.num_hung_up == 2


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"vllm_server_base_url": ["http://a:8000"]}, "requires use_vllm=True and vllm_mode='server'"),
        ({"vllm_server_base_url": "http://a:8000"}, "requires use_vllm=True and vllm_mode='server'"),
        ({"vllm_server_base_url": ["a:8000"]}, "must be a URL that begins with http"),
        ({"vllm_server_base_url": "http://a,b"}, "must be a URL that begins with http"),
        ({"vllm_server_base_url": ["http://a", "http://a"]}, "several distinct ones"),
    ],
)
def test_settings_of_servers_that_mean_nothing_are_refused(
    values: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        GRPOEnvConfig(output_dir=str(tmp_path), use_cpu=True, **values)


@pytest.mark.parametrize("given", [["http://a:1", "http://b:2"], "http://a:1,http://b:2", "http://a:1, http://b:2"])
def test_trl_is_given_the_first_of_several_servers(given: Any, tmp_path: Path) -> None:
    server: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "use_vllm": True, "vllm_mode": "server"}
    args = GRPOEnvConfig(**server, vllm_server_base_url=given)
    assert args.vllm_server_urls == ("http://a:1", "http://b:2")
    assert args.for_trl().vllm_server_base_url == "http://a:1"
    assert GRPOEnvConfig(**server, vllm_server_base_url="http://a:1").vllm_server_urls == ("http://a:1",)
    assert GRPOEnvConfig(**server).vllm_server_urls == ()


def test_a_trainer_calls_every_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_trainer, "VLLMGeneration", BuiltGeneration)
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    trainer = trainer_of(tmp_path, use_vllm=True, vllm_mode="server", vllm_server_base_url=urls)
    agent = trainer.agent
    assert isinstance(agent, VLLMPolicyAgent)
    assert [server.url for server in agent._engine.servers] == urls  # type: ignore[union-attr]
    assert agent.generation.server_base_url == urls[0]
    assert trainer.args.vllm_server_base_url == urls  # which a checkpoint keeps


def rank_with_server(rank: int, folder: str, port: int, urls: list[str]) -> None:
    """Play on one of two ranks, a rank without episodes among them, and one whose push fails."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    accelerator = Accelerator(cpu=True)
    generation = ScriptedGeneration(
        Engine(), "server", server_base_url=urls[0], server_timeout=5.0, accelerator=accelerator
    )
    agent = generation.agent(server_urls=urls)
    agent.prepare(started(0))
    played = play(agent, num_sessions=[6, 2][rank])
    nothing = play(agent, num_sessions=[0, 2][rank])  # nobody waits for the rank that has none
    refused = ""
    if rank == 0:
        generation.sync_weights = lambda: 1 / 0
    try:
        agent.prepare(started(1))
    except AgentsGymError as error:
        refused = str(error)
    result = {"played": played, "nothing": nothing, "refused": refused, "pushes": pushes(agent)}
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    accelerator.end_training()


def test_each_rank_calls_the_servers_itself_and_the_first_alone_pushes(
    servers: list[StubServer], tmp_path: Path
) -> None:
    urls = [server.url for server in servers]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks: Any = multiprocessing.start_processes(
        rank_with_server, args=(str(tmp_path), port, urls), nprocs=2, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + 300
    while not ranks.join(timeout=5):
        if time.monotonic() > deadline:
            for process in ranks.processes:
                process.kill()
            pytest.fail("the ranks wait for each other")
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for result in (first, second):
        assert all(one["output"] == one["wanted"] for one in [*result["played"], *result["nothing"]])
    assert (first["pushes"], second["pushes"]) == (urls, [])
    assert "ZeroDivisionError" in first["refused"]
    assert "rank 0 of the run failed" in second["refused"]
    assert [len(server.completions) for server in servers] == [15, 15]  # of 6 + 2 + 2 sessions of 3 turns


REPLICAS = {"parallel_config": {"data_parallel_size": 2}}


@pytest.fixture
def loading(servers: list[StubServer], monkeypatch: pytest.MonkeyPatch) -> list[StubServer]:
    """The servers, which can load adapters; what they sample is scripted, and so not compared."""
    monkeypatch.setattr("agentsgym.agents.vllm.adapters._MAX_GAP", math.inf)
    for server in servers:
        server.config = {"lora_config": {"max_loras": 1 + (server is servers[1])}}
    return servers


def adapting(urls: list[str], accelerator: Any = None, **options: Any) -> Any:
    """The agent of a model with adapters, the same on each rank; they are sharded if there are several."""
    generation = ScriptedGeneration(
        Engine(), "server", server_base_url=urls[0], server_timeout=5.0, accelerator=accelerator
    )
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model: Any = get_peft_model(generation.model, lora)
    generation.model, weights = model, {name: one.clone() for name, one in model.state_dict().items()}
    if accelerator is not None:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
    agent = generation.agent(server_urls=urls, **options)
    agent.adapters = {name.replace(".default.", "."): one for name, one in weights.items() if ".lora_" in name}
    return agent


def assert_loaded(server: StubServer, adapters: dict[str, torch.Tensor]) -> None:
    ((name, loaded),) = server.adapters.items()
    assert name == server.version
    torch.testing.assert_close(loaded, adapters, atol=0, rtol=0)


def test_a_restarted_server_loads_adapters_again_and_is_not_called_before(loading: list[StubServer]) -> None:
    agent = adapting([server.url for server in loading])
    agent.prepare(started(0))
    loading[0].stop()
    loading[0].start()
    assert all(one["fault"] is None for one in play(agent))  # the other server answers
    assert {requested["model"] for requested in loading[1].completions[-6 * 3 :]} == {loading[1].version}
    agent.prepare(started(0))
    for server in loading:
        assert_loaded(server, agent.adapters)
    assert pushes(agent) == []


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ({"config": {}}, {}, "start it with VLLM_SERVER_DEV_MODE=1"),
        ({"config": {"parallel_config": {}}}, {}, "it was started without --enable-lora"),
        ({}, {"pauses": True}, "its --max-loras is below 2"),
        ({"config": {"lora_config": {"max_loras": 1}} | REPLICAS}, {}, "one of its 2 data-parallel replicas"),
        ({"loads_adapters": False}, {}, "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"version": "other"}, {}, "its own weights were replaced (version 'other')"),
    ],
)
def test_a_server_that_cannot_load_adapters_gets_merged_weights_and_the_other_does_not(
    changes: dict[str, Any], options: dict[str, Any], sentence: str, loading: list[StubServer], caplog: Any
) -> None:
    agent = adapting([server.url for server in loading], **options)
    for name, value in changes.items():
        setattr(loading[0], name, value)
    for step in range(2):
        agent.prepare(started(step))
    assert all(one["fault"] is None for one in play(agent))
    assert pushes(agent) == [loading[0].url] * 2
    models = [{requested["model"] for requested in server.completions[-9:]} for server in loading]
    assert models == [{"tiny"}, {loading[1].version}]
    assert caplog.text.count("gets merged weights instead of adapters") == 1
    assert sentence in caplog.text


def test_no_adapters_are_loaded_where_trl_pushes_merged_weights(loading: list[StubServer]) -> None:
    agent = adapting([loading[0].url])
    agent.weights_loaded(0)
    for step in range(2):
        agent.prepare(started(step))
    assert (pushes(agent), loading[0].adapters) == ([loading[0].url], {})


def rank_with_adapters(rank: int, folder: str, port: int, urls: list[str]) -> None:
    """Play with adapters that FSDP2 shards over two ranks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    accelerator = Accelerator(cpu=True)
    agent = adapting(urls, accelerator)
    agent.prepare(started(0))
    faults = [one["fault"] for one in play(agent)]
    torch.save({"faults": faults, "pushes": pushes(agent), "adapters": agent.adapters}, Path(folder, f"{rank}.pt"))
    accelerator.end_training()


def test_sharded_adapters_are_gathered_and_every_rank_names_them(loading: list[StubServer], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = (str(tmp_path), port, [server.url for server in loading])
    multiprocessing.start_processes(rank_with_adapters, arguments, nprocs=2, start_method="spawn")
    for rank in range(2):
        results = torch.load(tmp_path / f"{rank}.pt")
        assert (results["faults"], results["pushes"]) == ([None] * 6, [])
        for server in loading:
            assert_loaded(server, results["adapters"])
    assert {requested["model"] for server in loading for requested in server.completions} == {loading[0].version}
