"""Measure adapters alone on real vLLM servers on this CPU, beside merged weights: pushes, sampling, and drift.

SmolLM2-135M with random LoRA adapters of rank 16 on all linear layers. Everything alternates in one run, and CPU
seconds are those of the server's processes and, for pushes, also the trainer's. On a CPU, merged weights reach the
server in a file, not over NCCL. Base weights drift as TRL merges and unmerges adapters in bfloat16.

    cd tests/with_vllm && PYTHONPATH=../.. python -m benchmarks.adapters_vllm [drift] [served]
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}

import torch
from accelerate import Accelerator
from cpu_support import CPUGeneration, Server
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentsgym import packaged_model
from agentsgym.agents.trained import BatchStart
from agentsgym.agents.vllm.policy import VLLMPolicyAgent
from agentsgym.agents.vllm.server import open_session
from agentsgym.event_loop import run_coroutine
from benchmarks.record import median, record

ROUNDS = 3


def model(dtype: torch.dtype) -> Any:
    """SmolLM2 with adapters as large as those of a trained one."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(packaged_model(), dtype=dtype)
    peft = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in peft.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return peft


def agent_of(server: Server, adapted: Any) -> Any:
    """The agent that samples on a server."""
    tokenizer = AutoTokenizer.from_pretrained(packaged_model())
    options: dict[str, Any] = {"mode": "server", "server_base_url": server.url}
    return VLLMPolicyAgent(CPUGeneration(adapted, Accelerator(cpu=True), tokenizer, **options), tokenizer)


def cpu_s(server: Server) -> float:
    """CPU seconds of the processes of a server."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:13])) if int(fields[2]) == server._process.pid else 0
    return total / os.sysconf("SC_CLK_TCK")


def cost(server: Server, call: Callable[[], Any]) -> float:
    """CPU seconds of a call, here and in the server."""
    before = cpu_s(server) + time.process_time()
    call()
    return cpu_s(server) + time.process_time() - before


def sample(agent: Any, model_name: str = "", *, num_requests: int = 16, num_tokens: int = 16) -> None:
    """Sample so many tokens for each of so many prompts at once."""
    (one,) = agent._engine.servers
    fields = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, **({"model": model_name} if model_name else {})}

    async def together() -> None:
        async with open_session(num_requests) as session:
            prompts = [[100 + index] * 32 for index in range(num_requests)]
            await asyncio.gather(*(one.complete(session, prompt, num_tokens, fields) for prompt in prompts))

    run_coroutine(together())


def served() -> dict[str, Any]:
    """Pushes and sampling with adapters, relative to merged weights on a server that has never heard of adapters."""
    starts = [{"enable_lora": True, "max_lora_rank": 16}, {}]
    servers = [Server(Path(packaged_model()), **options) for options in starts]
    pushes: list[list[float]] = [[], []]
    samples: list[list[float]] = [[], [], []]
    try:
        for server in servers:
            server.start()
        agents = [agent_of(server, model(torch.float32)) for server in servers]
        for step in range(-1, ROUNDS):
            start = BatchStart(seed_parts=(), session_ids=(), first_session=0, step=step)
            for index in range(2):
                seconds = cost(servers[index], partial(agents[index].prepare, start))
                pushes[index] += [seconds] if step >= 0 else []  # the first checks the server
                print("push", step, index, seconds, flush=True)
            (one,) = agents[0]._engine.servers
            for index, (place, name) in enumerate([(0, ""), (1, ""), (0, one.model)]):
                seconds = cost(servers[place], partial(sample, agents[place], name))
                samples[index] += [seconds] if step >= 0 else []
                print("sample", step, index, seconds, flush=True)
        assert agents[0].generation.num_syncs == 0
        root = agents[0]._weights._adapters.folder
        sizes = {"adapters": sum(one.stat().st_size for one in root.iterdir())}
        sizes["merged"] = sum(
            one.nbytes for one in agents[0].generation.model.get_base_model().parameters() if not one.requires_grad
        )
        for agent in agents:
            agent.finish()
    finally:
        for server in servers:
            server.end()
    print("push", pushes, "sample", samples, "bytes", sizes, flush=True)
    return {
        "bytes": median([sizes["merged"] / sizes["adapters"]]),
        "push: CPU time": _ratio(pushes[1], pushes[0]),
        "sampling: CPU time with adapters": _ratio(samples[0], samples[1]),
        "sampling: CPU time of the base model where adapters can be loaded": _ratio(samples[2], samples[1]),
    }


def _ratio(over: list[float], under: list[float]) -> Any:
    return median([a / b for a, b in zip(over, under, strict=True)])


def drift() -> dict[str, Any]:
    """How far base weights in bfloat16 are from their start after merges, as a fraction of their norm, in percent."""
    adapted = model(torch.bfloat16)
    weights = [one.weight for name, one in adapted.named_modules() if name.endswith(".base_layer")]
    before = [one.detach().float().clone() for one in weights]
    norm = sum(one.square().sum().item() for one in before)
    figures: dict[str, Any] = {}
    for count in range(1, 101):
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if ".lora_" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-4)  # an optimizer step
        adapted.merge_adapter()
        adapted.unmerge_adapter()
        if count in (1, 100):
            moved = sum((one.float() - old).square().sum().item() for one, old in zip(weights, before, strict=True))
            figures[f"drift after {count}: percent"] = median([100 * (moved / norm) ** 0.5])
    return figures


if __name__ == "__main__":
    for part in sys.argv[1:] or ["drift", "served"]:
        figures = drift() if part == "drift" else served()
        print(figures, flush=True)
        record(Path(__file__).parent / "results", f"adapters_{part}", figures, [0], None)
