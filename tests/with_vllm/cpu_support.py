"""What TRL's vLLM classes need on a CPU: another data type, and another way for the weights. For tests alone.

TRL loads weights into the layers themselves, which vLLM has repacked on a CPU, and sends them to a server over NCCL.
Here vLLM reloads them: in process from the parameters, behind a server from a file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import requests
import trl.generation.vllm_generation as trl_vllm
from on_cpu import ENGINE_OPTIONS, as_arguments
from safetensors.torch import save_file
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.tiny import tiny_policy


def saved_policy(game: dict[str, Any], folder: Path) -> Path:
    """Save the tiny policy of a Twenty Questions, with heads as wide as vLLM's attention on a CPU wants them."""
    for part in tiny_policy(TwentyQuestionsEnv(env_config=game), hidden_size=64, num_heads=2):
        part.save_pretrained(folder)
    return folder


class FileClient(VLLMClient):
    """TRL's client of a server that gets its weights from a file, not from a group of processes."""

    def init_communicator(self, device: Any = 0) -> None:
        pass

    def close_communicator(self) -> None:
        pass


class CPUGeneration(VLLMGeneration):
    """TRL's ``VLLMGeneration``, colocated or over a server, on a CPU.

    Attributes:
        num_syncs: How many times the weights were handed over.
    """

    num_syncs = 0

    def _init_vllm(self) -> None:
        if self.mode == "server":
            if self.accelerator.is_main_process:
                self.vllm_client = FileClient(base_url=self.server_base_url, connection_timeout=self.server_timeout)
            return
        with patch.object(trl_vllm, "LLM", partial(trl_vllm.LLM, **ENGINE_OPTIONS)):
            super()._init_vllm()

    def sync_weights(self) -> None:
        self.num_syncs += 1
        if self.mode == "server":
            if self.accelerator.is_main_process:
                self._reload_from_file()
                self.vllm_client.reset_prefix_cache()
        else:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._iter_named_params()})
            self.llm.reset_prefix_cache()

    def _reload_from_file(self) -> None:
        with TemporaryDirectory() as folder:
            weights = {name: param.detach().clone() for name, param in self._iter_named_params()}
            save_file(weights, Path(folder, "model.safetensors"))
            call = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            response = self.vllm_client.session.post(f"{self.vllm_client.base_url}/collective_rpc", json=call)
            response.raise_for_status()


class Server:
    """A model served as TRL wants it served, in processes of its own.

    Attributes:
        url: Where.
    """

    def __init__(
        self, model_folder: Path, *, max_model_length: int = 512, timeout_s: float = 600, **options: Any
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        where = {"model": model_folder, "max_model_len": max_model_length, "host": "127.0.0.1", "port": port}
        self._arguments, self._timeout_s = as_arguments({**ENGINE_OPTIONS, **where, **options}), timeout_s

    def start(self) -> None:
        """Start it, or start it again at the same place."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self._arguments]
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        with TemporaryDirectory() as folder, Path(folder, "log").open("w+") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            _wait_until_up(self._process, self.url, time.monotonic() + self._timeout_s, Path(log.name))

    def end(self, number: int = signal.SIGTERM) -> None:
        """End it, with the processes that it has of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        self._process.wait(timeout=30)


@contextlib.contextmanager
def served(model_folder: Path, *, max_model_length: int = 512, **options: Any) -> Generator[Server]:
    """Serve a model."""
    server = Server(model_folder, max_model_length=max_model_length, **options)
    try:
        server.start()
        yield server
    finally:
        server.end()


def _wait_until_up(process: subprocess.Popen[bytes], url: str, deadline: float, log: Path) -> None:
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(requests.ConnectionError):
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the vLLM server did not come up:\n{log.read_text()[-4000:]}")
