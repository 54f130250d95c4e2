"""What the scenario ``exits`` starts: it forks pairs of ranks that train a step and end as any interpreter does.

The threads of the process group run at the lowest priority, on a processor that another process keeps busy, so that
they are late: what they still do when the interpreter ends is what aborts it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any

import torch
from accelerate import PartialState

from agentsgym import GRPOEnvConfig, GRPOEnvTrainer
from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, TwentyQuestionsEnv
from agentsgym.tiny import tiny_policy

ENV_CONFIG: dict[str, Any] = {
    "objects": list(DEMO_OBJECTS),
    "properties": list(DEMO_PROPERTIES),
    "max_steps_per_episode": 1,
}
STARVED, NORMAL = 10, 0  # niceness


def train(folder: str) -> None:
    """Train one step on this rank, and close the trainer."""
    os.setpriority(os.PRIO_PROCESS, 0, STARVED)  # of the threads that are started here
    PartialState(cpu=True).wait_for_everyone()
    os.setpriority(os.PRIO_PROCESS, 0, NORMAL)  # of the main thread alone
    model, tokenizer = tiny_policy(TwentyQuestionsEnv(env_config=ENV_CONFIG), hidden_size=16, num_heads=2, seed=0)
    args = GRPOEnvConfig(
        output_dir=folder,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        max_steps=1,
        per_device_train_batch_size=2,
        num_generations=4,
        max_turn_tokens=2,
    )
    rows = TwentyQuestionsEnv.get_train_dataset(ENV_CONFIG)
    env = TwentyQuestionsEnv(tokenizer, ENV_CONFIG)
    with GRPOEnvTrainer(model, env, args, train_dataset=rows) as trainer:
        trainer.train()


def fork_ranks() -> list[int]:
    """Fork two ranks; returns their process ids, and in a rank none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children: list[int] = []
    for rank in (0, 1):
        child = os.fork()
        if not child:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return []
        children.append(child)
    return children


def keep_busy() -> int:
    """Fork a process that keeps the processor of all of these busy; returns its id."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    parent, child = os.getpid(), os.fork()
    while not child and os.getppid() == parent:
        pass
    if not child:
        os._exit(0)
    return child


def main(num_runs: int, folder: str) -> None:
    """Fork the runs one after the other, and print the status of each rank; a rank trains, and returns."""
    busy, statuses = keep_busy(), list[list[int]]()
    for _ in range(num_runs):
        children = fork_ranks()
        if not children:
            train(folder)
            return  # ends as any script does: with the interpreter's own end, and that of the C++ beneath it
        statuses.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    os.kill(busy, signal.SIGKILL)
    print(json.dumps(statuses))


if __name__ == "__main__":
    torch.set_num_threads(1)  # a fork has no other threads
    main(int(sys.argv[1]), sys.argv[2])
