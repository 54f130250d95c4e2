"""Scripts on two ranks: how they are started, and how a rank ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentsgym.training.lifecycle.restartable import end_process_group

PLAIN = ("--multi_gpu",)


def launch(
    script: Path,
    *arguments: Path | str,
    config: Path | None = None,
    timeout_s: float = 300,
    options: Sequence[str] = PLAIN,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script on two ranks; a deadlock is a failure, not a wait, and none of its processes outlives it.

    Args:
        script: What each rank runs.
        *arguments: Its own.
        config: A configuration of accelerate's, which then names how the ranks are put together, in place of options.
        timeout_s: Seconds that it may take.
        options: What the launcher is given besides.
        variables: Of the environment, besides.
    """
    how = options if config is None else ("--config_file", str(config))
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", *how, "--num_processes", "2", "--num_machines", "1"),
        *("--num_cpu_threads_per_process", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
        *("--main_process_port", "0", str(script), *map(str, arguments)),
    ]
    folders = [script.parent, Path(__file__).parent, script.parents[2]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **(variables or {})}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # it then ends its ranks, which killing it would leave behind
        output, errors = process.communicate(timeout=60)
        raise AssertionError(f"no end within {timeout_s} s: {output[-2000:]}{errors[-4000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def leave() -> None:
    """End this rank's part in the group, where several trainers were, none of which was closed."""
    end_process_group()
