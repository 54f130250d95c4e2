"""Two ranks on which engines fail, or that are signaled: no rank waits for ever, and a run goes on exactly."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import trl.generation.vllm_generation as trl_vllm
import trl.trainer.grpo_trainer as trl_trainer
from rank_faults import NUM_STEPS, Ahead, RankFaults, Start
from sharded_run import shard_on_cpu
from signaled import TURN, at_rank_1, checkpoints, training, while_rank_0_waits
from vllm_engines import BuiltGeneration, Guessing
from vllm_stub import StubServer

from agentsgym.training.trainer import GRPOEnvTrainer
from benchmarks.fault_scenarios.runs import Run, policy_of_game, train


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


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """What uninterrupted runs came to, by the number of ranks."""
    results: dict[int, Any] = {}

    def run(num_ranks: int) -> Any:
        if num_ranks not in results:
            started = Run(tmp_path_factory.mktemp("straight") / "run", num_ranks, training())
            assert started.wait()
            results[num_ranks] = started.result()
        return results[num_ranks]

    return run


@pytest.mark.parametrize("act", [at_rank_1, while_rank_0_waits])
def test_a_signal_at_one_rank_ends_both_and_both_go_on_exactly(act: Any, straight: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = Run(folder, 2, training(act))
    assert first.wait()
    assert [*first.statuses.values()] == [143, 143], first.result()
    assert len(checkpoints(folder)) == 1
    assert checkpoints(folder) < ["checkpoint-4"]  # that of the rollouts that were broken off, not of the next step
    second = Run(folder, 2, training())
    assert second.wait()
    assert second.result() == straight(2)


def twice_while_rank_0_waits(rank: int, turn: int) -> None:
    """The first rank is signaled twice while it waits for the other, which hangs in one step."""
    if rank == 0 and turn == TURN:
        for delay_s in (0.5, 2.0):
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGTERM)).start()
    if rank == 1 and turn == TURN:
        time.sleep(600)


def test_a_second_signal_ends_a_rank_that_waits_for_another(tmp_path: Path) -> None:
    started = Run(tmp_path / "run", 2, training(twice_while_rank_0_waits))
    while not started.is_over and not started.statuses:
        time.sleep(0.05)
    assert [*started.statuses.values()] == [143]
    started.signal(signal.SIGKILL, rank=1)
    assert started.wait()
    assert checkpoints(tmp_path / "run") == []


def hung_up(rank: int, turn: int) -> None:
    """The terminal closes, which the kernel reports the process at once."""
    if turn == TURN:
        os.close(int(os.environ["TERMINAL"]))


def in_a_terminal(folder: Path, **changes: Any) -> None:
    """Train in a terminal of the process's own, which it prints to."""
    os.setsid()
    terminal, own_end = os.openpty()
    fcntl.ioctl(own_end, termios.TIOCSCTTY, 0)
    for stream in (0, 1, 2):
        os.dup2(own_end, stream)
    os.environ["TERMINAL"] = str(terminal)
    sys.stdout = sys.stderr = os.fdopen(1, "w")
    train(folder, **changes)


def test_a_run_whose_terminal_closes_saves_although_it_prints(straight: Any, tmp_path: Path) -> None:
    first = Run(tmp_path / "run", 1, training(hung_up, in_a_terminal, preemption_grace_s=None))
    assert first.wait()
    assert [*first.statuses.values()] == [129], first.result()
    assert len(checkpoints(tmp_path / "run")) == 1
    second = Run(tmp_path / "run", 1, training())
    assert second.wait()
    assert second.result() == straight(1)


def test_the_status_is_preempted_where_nobody_catches_it() -> None:
    code = (
        "import signal\n"
        "from agentsgym.training.lifecycle.preemption import PreemptedByUser\n"
        "raise PreemptedByUser(signal.SIGINT, 3, None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (130, False)  # imported packages may write there
