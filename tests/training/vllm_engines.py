"""What stands under TRL's ``VLLMGeneration`` where vLLM is not installed: its answers are scripted, the rest is TRL's.

Also the two processes in which the ranks of a policy on vLLM meet: everything between them is TRL's own code.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import timedelta
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
import trl.generation.vllm_generation as trl_vllm
from accelerate import Accelerator, InitProcessGroupKwargs
from bare_trials import drive
from games import NUMBERS, policy
from trl.generation.vllm_generation import VLLMGeneration
from vllm_stub import StubServer, ended

from agentsgym import Action, AgentError, AgentsGymError, TurnRequest, tiny_policy
from agentsgym.agents.trained import BatchStart
from agentsgym.agents.vllm import fleet as vllm_servers
from agentsgym.agents.vllm import weights as vllm_weights
from agentsgym.agents.vllm.lockstep import LockstepVLLMPolicyAgent
from agentsgym.agents.vllm.policy import VLLMPolicyAgent

WORDS = "one two three four five six seven eight nine ten stop here."
NUM_RANKS = 2
Script = Callable[[list[int]], list[int]]


def scripted(prompt: list[int]) -> list[int]:
    """One to three words that only this prompt is answered with, and the end of turn."""
    mixed = sum((place + 1) * token for place, token in enumerate(prompt))
    return [4 + (mixed + step) % 9 for step in range(1 + mixed % 3)] + [2]


class OutputKind(Enum):
    """vLLM's ``RequestOutputKind``."""

    CUMULATIVE = 0
    FINAL_ONLY = 2


class Params(SimpleNamespace):
    """vLLM's ``SamplingParams``."""

    output_kind = OutputKind.CUMULATIVE


class Client:
    """What TRL's client of a server does with weights."""

    engine: Engine

    def __init__(self, base_url: str, group_port: int = 51216, connection_timeout: float = 0) -> None:
        self.base_url, self.group_port = base_url, group_port
        self.session = requests.Session()

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def init_communicator(self, device: Any) -> None:
        self.engine.events.append(("connect", self.base_url, self.group_port))

    def close_communicator(self) -> None:
        self.engine.events.append(("disconnect", self.base_url))

    def update_named_params(self, metadata: Any, params: Any) -> None:
        self.engine.events.append(("push", self.base_url))
        self.engine.push(params)

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()


class Engine:
    """vLLM's colocated ``LLM`` and its engine, which samples a token a step, and what was requested of it, in order."""

    def __init__(self, script: Script = scripted, logprob: float = -0.5, context: int = 4096) -> None:
        self.script, self.logprob = script, logprob
        self.events: list[Any] = []
        self.calls: list[list[list[int]]] = []  # of whole batches, as tensor parallelism makes them
        self.requested: list[dict[str, Any]] = []
        self.fails_at: set[int] = set()  # calls of batches, or requests
        self.breaks_at: int | None = None  # a step
        self.hangs_for = 0.0  # seconds a step
        self.cannot_read: int | None = None  # a token
        self.num_steps = 0
        self.widths: list[int] = []  # requests that each step advanced
        self.answered: list[list[int]] = []  # prompts, in the order of their answers
        self.aborted: list[str] = []
        self.running: dict[str, list[Any]] = {}

        model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.push))
        driver_worker = SimpleNamespace(model_runner=model_runner)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=driver_worker),
            model_config=SimpleNamespace(max_model_len=context),
            add_request=self.add_request,
            step=self.step,
            abort_request=self.abort_request,
        )

    def get_default_sampling_params(self) -> Params:
        return Params()

    def push(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.events.append(("load", *(name for name, _ in weights)))

    def reset_prefix_cache(self) -> None:
        self.events.append("reset")

    def wake_up(self, tags: list[str]) -> None:
        self.events.append(("wake", *tags))

    def sleep(self, level: int) -> None:
        self.events.append(("sleep", level))

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Params) -> None:
        ids = prompt["prompt_token_ids"]
        self.requested.append(vars(params))
        if self.cannot_read in ids:
            raise ValueError("the engine cannot read the prompt")
        if len(self.requested) - 1 in self.fails_at:
            raise ConnectionError("the engine is gone")
        self.running[name] = [ids, self._ended(self.script(ids), vars(params)), 0]

    def step(self) -> list[Any]:
        time.sleep(self.hangs_for)
        if self.num_steps == self.breaks_at:
            raise RuntimeError("out of memory")
        self.num_steps += 1
        self.widths.append(len(self.running))
        outputs: list[Any] = []
        for name, one in [*self.running.items()]:
            one[2] += 1
            if one[2] >= len(one[1]):
                del self.running[name]
                self.answered.append(one[0])
                outputs.append(self._output(one[0], one[1], name))
        return outputs

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            del self.running[name]

    def generate(self, prompts: list[Any], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        """Answer a batch, as TRL requests it under tensor parallelism."""
        ids, options = [prompt["prompt_token_ids"] for prompt in prompts], vars(sampling_params)
        self.events.append("generate")
        self.calls.append(ids)
        self.requested.append(options)
        if len(self.calls) - 1 in self.fails_at:
            raise ConnectionError("the engine is gone")
        return [self._output(prompt, self._ended(self.script(prompt), options)) for prompt in ids]

    def _ended(self, answer: list[int], options: dict[str, Any]) -> list[int]:
        return ended(answer, options["stop_token_ids"], options["max_tokens"])

    def _output(self, prompt: list[int], answer: list[int], name: str = "") -> Any:
        logprobs = [{token: SimpleNamespace(rank=1, logprob=self.logprob)} for token in answer]
        choice = SimpleNamespace(token_ids=answer, logprobs=logprobs, finish_reason="stop")
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[choice], request_id=name, finished=True)


class ScriptedGeneration(VLLMGeneration):
    """TRL's class, with an :class:`Engine` in the place of vLLM.

    On the rank that ``breaks``, and there alone, calls raise when they have been made.
    """

    def __init__(self, engine: Engine, mode: str = "colocate", breaks: int | None = None, **options: Any) -> None:
        self.engine, self.breaks = engine, breaks
        trl_vllm.SamplingParams = SimpleNamespace  # TRL imports it only where vLLM is installed
        model, self.tokenizer = tiny_policy([WORDS], hidden_size=16, num_heads=2, num_layers=1)
        super().__init__(
            model, options.pop("accelerator", None) or Accelerator(cpu=True), self.tokenizer, mode, **options
        )

    def _init_vllm(self) -> None:
        if self.mode == "server":
            if self.accelerator.is_main_process:
                self.vllm_client = type("ItsClient", (Client,), {"engine": self.engine})(self.server_base_url)
            return
        self.llm = self.engine
        if self.tensor_parallel_size > 1:
            self.tp_group = torch.distributed.new_group()

    def generate(self, *args: Any, **options: Any) -> Any:
        answers = super().generate(*args, **options)
        if self.accelerator.process_index == self.breaks:
            raise MemoryError("no room for the answers")
        return answers

    def sync_weights(self) -> None:
        super().sync_weights()
        if self.accelerator.process_index == self.breaks:
            raise MemoryError("no room for the weights")

    def agent(self, **options: Any) -> Any:
        kind = LockstepVLLMPolicyAgent if self.tensor_parallel_size > 1 else VLLMPolicyAgent
        return kind(self, self.tokenizer, **options)


class Guessing(Engine):
    """Answers a number of the guessing game, another one each time."""

    def __init__(self, tokenizer: Any = None) -> None:
        tokenizer = tokenizer or policy()[1]
        rng = random.Random(0)
        numbers = [tokenizer.encode(f" {number}", add_special_tokens=False) for number in NUMBERS]
        super().__init__(lambda _: [*rng.choice(numbers), tokenizer.eos_token_id])


class BuiltGeneration(ScriptedGeneration):
    """As TRL's trainer builds it, for the guessing game."""

    def __init__(self, **options: Any) -> None:
        self.engine, self.breaks = Guessing(), None
        super(ScriptedGeneration, self).__init__(**options)


def started(step: int) -> BatchStart:
    """The start of a generation batch after so many optimizer steps."""
    return BatchStart(seed_parts=(), session_ids=(), first_session=0, step=step)


def session(first: int, num_turns: int, room: int | None = None) -> Generator[TurnRequest, Action, dict[str, Any]]:
    """A conversation about nothing: what it was answered, and what it should have been."""
    prompt, output, wanted = [first], [], []
    try:
        for _ in range(num_turns):
            wanted.append(scripted(prompt)[:room])
            action = yield TurnRequest(session_id="", messages=[], token_ids=prompt, max_new_tokens=room)
            output.append(list(action.token_ids or ()))
            prompt = [*prompt, *output[-1], 3]
    except AgentError as fault:
        return {"output": output, "wanted": wanted[:-1], "fault": str(fault)}
    return {"output": output, "wanted": wanted, "fault": None}


def conversation(name: str, first: int, num_turns: int) -> Generator[TurnRequest, Action, dict[str, Any]]:
    """As ``session``, with an id of its own."""
    inner = session(first, num_turns)
    output = None
    while True:
        try:
            request = next(inner) if output is None else inner.send(output)
            try:
                output = yield TurnRequest(session_id=name, messages=[], token_ids=list(request.token_ids))
            except AgentError as error:
                inner.throw(error)
        except StopIteration as stop:
            return stop.value


def play(agent: Any, num_sessions: int = 6, num_turns: int = 3, **options: Any) -> list[dict[str, Any]]:
    """Play conversations about nothing."""
    return drive([conversation(f"s{i}", 5 + i, num_turns) for i in range(num_sessions)], agent, **options)


# Turns of each session, on rank 0 and on rank 1.
UNEVEN = ([1, 3], [5, 2, 2])
MEETINGS: dict[str, Any] = {
    "uneven": {"turns": UNEVEN},
    "first_has_none": {"turns": ([], [2, 4])},
    "second_has_none": {"turns": ([3, 1, 1], [])},
    "own_budgets": {"turns": UNEVEN, "rooms": (1, 9)},
    "engine_fails": {"turns": UNEVEN, "fails_at": [1]},
    "first_rank_breaks": {"turns": UNEVEN},
    "second_rank_breaks": {"turns": UNEVEN},
    "second_rank_breaks_alone": {"turns": ([2], [])},
}
BREAKS = {"first_rank_breaks": 0, "second_rank_breaks": 1, "second_rank_breaks_alone": 1}


def meet(rank: int, folder: str, port: int) -> None:
    """Play every meeting in both modes on one rank, and write down what came of it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=60))])
    modes: dict[str, dict[str, Any]] = {
        "tensor_parallel": {"mode": "colocate", "tensor_parallel_size": NUM_RANKS, "accelerator": accelerator}
    }
    results: dict[str, Any] = {}
    for mode, options in modes.items():
        for name, meeting in MEETINGS.items():
            generation = ScriptedGeneration(Engine(), **options, breaks=BREAKS.get(name))
            results[f"{mode}/{name}"] = _meeting(rank, generation, **meeting)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    accelerator.end_training()


def _meeting(
    rank: int,
    generation: ScriptedGeneration,
    turns: tuple[list[int], list[int]],
    rooms: tuple[int, int] | None = None,
    fails_at: Sequence[int] = (),
) -> dict[str, Any]:
    engine = generation.engine
    engine.fails_at = set(fails_at)
    agent = generation.agent(max_turn_tokens=20)
    refused = None
    try:
        agent.prepare(started(0))
    except (AgentsGymError, MemoryError) as error:
        refused = f"{type(error).__name__}: {error}"
    room = None if rooms is None else rooms[rank]
    played = [drive([session(20 + 5 * rank + i, n, room) for i, n in enumerate(turns[rank])], agent) for _ in range(2)]
    return {
        "refused": refused,
        "played": played,
        "rows": [len(call) for call in engine.calls],
        "rooms": [requested["max_tokens"] for requested in engine.requested],
    }


def generation_of(server: StubServer, **options: Any) -> ScriptedGeneration:
    """TRL's engine of a server, without TRL."""
    values = {"server_base_url": server.url, "server_timeout": 5.0, "max_completion_length": 100}
    return ScriptedGeneration(Engine(), "server", **{**values, **options})


def agent_of(*servers: StubServer, **options: Any) -> Any:
    """The agent that samples on some servers."""
    generation = generation_of(servers[0])
    return generation.agent(server_urls=[server.url for server in servers], **options)


def ready(*servers: StubServer, **options: Any) -> Any:
    """The agent that samples on some servers, which have the weights of step 0."""
    agent = agent_of(*servers, **options)
    agent.prepare(started(0))
    return agent


def wait_less(monkeypatch: pytest.MonkeyPatch, *, pulse_s: float = 0.1) -> None:
    """Have everything that is waited for, waited for less long."""
    monkeypatch.setattr(vllm_servers, "WAITS_S", (0.0, 0.02, 0.02, 0.02))
    monkeypatch.setattr(vllm_servers, "PULSE_S", pulse_s)
    monkeypatch.setattr(vllm_weights, "_POLL_S", 0.05)
