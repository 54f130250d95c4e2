"""Scripts on two ranks: how they are started, and how a rank ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

from accelerate import PartialState

COMMAND = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--num_cpu_threads_per_process", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
    *("--main_process_port", "0"),
]


def launch(script: Path, *arguments: Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a script on two ranks; a deadlock is a failure, not a wait, and none of its processes outlives it."""
    command = [*COMMAND, str(script), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent), str(script.parents[2])])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # it then ends its ranks, which killing it would leave behind
        output, errors = process.communicate(timeout=60)
        raise AssertionError(f"no end within {timeout_s} s: {output[-2000:]}{errors[-4000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def leave() -> None:
    """End this rank's part in the group.

    The group's threads must be gone when the interpreter ends, or they abort it. They end with the group's last
    reference, which trainers in reference cycles hold until the garbage is collected.
    """
    gc.collect()
    PartialState().destroy_process_group()
