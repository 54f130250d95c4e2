"""Two ranks survive the same with sharded weights, a vLLM server, and rollouts that run ahead of training."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import trl.generation.vllm_generation as trl_vllm
import trl.trainer.grpo_trainer as trl_trainer
from rank_faults import NUM_STEPS, Ahead, RankFaults, Start
from sharded_run import shard_on_cpu
from signaled import TURN, training
from vllm_engines import BuiltGeneration, Guessing
from vllm_stub import StubServer

from agentsgym.training.trainer import GRPOEnvTrainer
from benchmarks.fault_scenarios.runs import policy_of_game


class TestShardedWeights(RankFaults):
    """FSDP2."""

    changes: ClassVar[Mapping[str, Any]] = {"fsdp": True}

    @classmethod
    def trainer(cls, folder: Path, **changes: Any) -> GRPOEnvTrainer:
        shard_on_cpu(GRPOEnvTrainer)  # of this process alone
        return super().trainer(folder, **changes)

    @classmethod
    def weights(cls, trainer: GRPOEnvTrainer) -> list[torch.Tensor]:
        return [one.full_tensor() for one in trainer.model.parameters()]


class TestRolloutsAhead(Ahead):
    """A copy of the weights samples while the policy is trained."""


def serve(reported: Any, port: int) -> None:
    """A server, which reports where it is and stays until it is called to go, or killed."""
    server = StubServer(Guessing(policy_of_game()[1]).script, port=port)
    server.start()
    reported.send(server.port)
    reported.recv()


class Server:
    """One in a process of its own.

    Attributes:
        port: Where it is.
        pid: Of its process.
    """

    def __init__(self, port: int = 0) -> None:
        self._reported, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=serve, args=(there, port), daemon=True)
        self._process.start()
        self.port: int = self._reported.recv()
        self.pid = self._process.pid

    def wait(self) -> None:
        """Wait for its end."""
        self._process.join(60)
        assert not self._process.is_alive()

    def end(self) -> None:
        """Ask it to go."""
        self._reported.send("go")
        self.wait()


class TestServer(RankFaults):
    """Answers are drawn by a server, which gets the weights from the first rank."""

    is_exact = False
    more: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def server(cls) -> Iterable[Server]:
        """The server, of which the class knows the URL."""
        server = Server()
        url = f"http://127.0.0.1:{server.port}"
        cls.changes = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, **cls.more}
        yield server
        server.end()

    @classmethod
    def trainer(cls, folder: Path, **changes: Any) -> GRPOEnvTrainer:
        trl_trainer.VLLMGeneration = BuiltGeneration  # of this process alone
        trl_vllm.SamplingParams = SimpleNamespace
        return super().trainer(folder, **changes)

    @classmethod
    def survivable(cls, url: str) -> dict[str, Any]:
        """The settings with which the death of a server is survived."""
        return {"vllm_server_base_url": url, "episode_retries": 3}

    def test_a_server_that_dies_and_comes_back_costs_no_rollout(self, start: Start, tmp_path: Path) -> None:
        mortal = Server()

        def kill(rank: int, turn: int) -> None:
            if rank == 1 and turn == TURN:
                os.kill(mortal.pid, signal.SIGKILL)

        url = f"http://127.0.0.1:{mortal.port}"
        run = start(tmp_path / "run", training(kill, self.train, **self.survivable(url)))
        mortal.wait()
        second = Server(mortal.port)
        assert run.wait()
        assert run.result().get("step") == NUM_STEPS, run.result()
        second.end()


class TestServerThatIsNotWaitedFor(TestServer):
    """And it pauses while it gets them, with rollouts in play."""

    more: ClassVar[Mapping[str, Any]] = {"max_staleness": 1}

    @classmethod
    def survivable(cls, url: str) -> dict[str, Any]:
        return {"vllm_server_base_url": [cls.changes["vllm_server_base_url"], url]}
