"""Measure what a call of a tool costs: the environment's part of it, and an MCP call beside the SDK's own.

    python benchmarks/tool_calls.py [--num_calls 2000]

A call goes through ``ToolEnv._step_action``: checks, the call, the result as a message, reward and info. Each figure is
the median over rounds in which both sides take turns, so that another process on the machine slows down both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentsgym.envs.Tools import McpServer, ToolEnv
from agentsgym.reports.tables import text_table
from agentsgym.types import Action, ToolCall

SCRIPT = Path(__file__).parent.parent / "tests" / "envs" / "mcp_stdio_server.py"
NUM_ROUNDS = 15


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


def stepper(env: ToolEnv, call: ToolCall) -> Callable[[], Any]:
    """One call as the environment plays it."""
    env.check_task({"question": "?"})
    state = env.start_session("benchmark", {"question": "?"}, seed=0)
    action = Action(text="", tool_calls=(call,))
    return lambda: env._step_action("benchmark", state, action)  # pyright: ignore[reportPrivateUsage]


def seconds_of(work: Callable[[], Any], count: int) -> float:
    """The time of one call, in seconds."""
    start = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - start) / count


def compare(ours: Callable[[], Any], bare: Callable[[], Any], count: int) -> tuple[float, float]:
    """The medians of both sides, in seconds a call."""
    rounds = [(seconds_of(ours, count), seconds_of(bare, count)) for _ in range(NUM_ROUNDS)]
    return statistics.median(one for one, _ in rounds), statistics.median(other for _, other in rounds)


async def beside_sdk(step: Callable[[], Any], arguments: dict[str, Any], count: int) -> tuple[float, float]:
    """Measure the median time of a call through the environment and through the SDK, each with its own server."""
    from mcp import ClientSession, StdioServerParameters, stdio_client  # noqa: PLC0415  # an extra

    parameters = StdioServerParameters(command=sys.executable, args=[str(SCRIPT)])
    rounds: list[tuple[float, float]] = []
    async with stdio_client(parameters) as streams, ClientSession(streams[0], streams[1]) as session:
        await session.initialize()
        for _ in range(NUM_ROUNDS):
            start = time.perf_counter()
            for _ in range(count):
                await session.call_tool("price", arguments)
            own = (time.perf_counter() - start) / count
            rounds.append((seconds_of(step, count), own))
    return statistics.median(one for one, _ in rounds), statistics.median(other for _, other in rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_calls", type=int, default=2000, help="Calls a round.")
    count: int = parser.parse_args().num_calls
    rows: list[list[str]] = []
    for label, limit_s in (("a function", None), ("a function, with a limit of time", 30.0)):
        env = ToolEnv(env_config={"tool_timeout_s": limit_s}, tools=add)
        ours, bare = compare(stepper(env, ToolCall(name="add", arguments={"a": 3, "b": 4})), lambda: add(3, 4), count)
        rows.append([label, f"{ours * 1e6:.0f}", f"{bare * 1e6:.2f}", f"{(ours - bare) * 1e6:.0f} us more"])
    env = ToolEnv(tools=McpServer(command=[sys.executable, str(SCRIPT)]))
    step = stepper(env, ToolCall(name="price", arguments={"good": "pear"}))
    ours, bare = asyncio.run(beside_sdk(step, {"good": "pear"}, max(1, count // 20)))
    rows.append(["an MCP server, stdio", f"{ours * 1e6:.0f}", f"{bare * 1e6:.0f}", f"{ours / bare:.2f} times"])
    env.close()
    print(text_table(["tool", "call, us", "bare or SDK, us", "difference"], rows))


if __name__ == "__main__":
    main()
