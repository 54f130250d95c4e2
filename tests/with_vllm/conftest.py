"""Tests on a real vLLM, left out where it is not installed: a small model, and a server with it, for all of them.

Were this folder called ``vllm``, TRL would take it for vLLM, since pytest puts the folder above on the path.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from on_cpu import ENGINE_OPTIONS, as_arguments

from agentsgym.testing import chat_tokenizer
from agentsgym.types import Trajectory

collect_ignore_glob = [] if find_spec("vllm") else ["*.py"]

if not collect_ignore_glob:
    # Read when torch and vLLM are imported.
    os.environ |= {
        "TORCH_COMPILE_DISABLE": "1",  # else the first request with log-probabilities compiles for half a minute
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

START_S = 600.0


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that looks at its context, with a chat tokenizer; the template's end of turn is not the model's end."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer: Any = chat_tokenizer("llama3")
    end_of_turn: int = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,  # 32 wide, the least that vLLM's attention on a CPU takes
                num_key_value_heads=2,
                max_position_embeddings=2048,
                initializer_range=0.2,  # by default it hardly attends
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.pad_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    with torch.no_grad():
        model.lm_head.weight[end_of_turn] *= 2  # answered often enough, and now and then not
    model.save_pretrained(folder)
    tokenizer.eos_token = tokenizer.pad_token  # of itself, vLLM stops at this one alone
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def recompute(model_dir: Path) -> Callable[[Sequence[int], float], list[float]]:
    """What transformers returns of a token stream at a temperature, in float32, (T,): 0.0 for the first token."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def logprobs(token_ids: Sequence[int], temperature: float) -> list[float]:
        ids = torch.tensor([list(token_ids)])
        with torch.no_grad():
            logits = model(ids).logits[:, :-1] / temperature  # (1, T - 1, V)
        return [0.0, *logits.log_softmax(-1).gather(2, ids[:, 1:, None])[0, :, 0].tolist()]

    return logprobs


@pytest.fixture(scope="session")
def largest_gap(
    recompute: Callable[[Sequence[int], float], list[float]],
) -> Callable[[Sequence[Trajectory], float], float]:
    """How far what the sampler answered of the agent's tokens is from what transformers returns."""

    def gap(trajectories: Sequence[Trajectory], temperature: float) -> float:
        gaps: list[float] = []
        for trajectory in trajectories:
            assert trajectory.logprobs is not None
            known = zip(trajectory.logprobs, recompute(trajectory.token_ids, temperature), strict=True)
            masked = zip(known, trajectory.agent_token_mask, strict=True)
            gaps += [abs(output - computed) for (output, computed), mask in masked if mask]
        assert gaps
        print(f"{len(gaps)} tokens at temperature {temperature}: largest gap {max(gaps):.1e}")
        return max(gaps)

    return gap


@pytest.fixture(scope="session")
def vllm_server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a running server; the model's name there is ``tiny``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"model": model_dir, "served_model_name": "tiny", "host": "127.0.0.1", "port": port}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *as_arguments({**where, **ENGINE_OPTIONS})]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait_until_up(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # it has processes of its own
        process.wait(timeout=60)


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
        else:
            return
    pytest.fail(f"the server did not come up:\n{log.read_text()[-4000:]}")
