"""Examples as a person runs them, in a process of their own; and, at no cost of imports, in this one."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging as transformers_logging

from agentsgym.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 240


def _command(name: str, output: Path, options: tuple[str, ...]) -> list[str]:
    return [sys.executable, str(FOLDER / f"{name}.py"), *options, "--output_dir", str(output)]


def summary_of(output: Path) -> dict[str, Any]:
    return json.loads((output / "summary.json").read_text(encoding="utf-8"))


def call_example(name: str, output: Path, *options: str) -> str:
    """Call an example's ``main`` in this process and give what it prints; it must end well."""
    verbosity, printed = transformers_logging.get_verbosity(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [name, *options, "--output_dir", str(output)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(FOLDER / f"{name}.py"))["main"]()
    transformers_logging.set_verbosity(verbosity)
    assert ended.value.code == 0, printed.getvalue()
    return printed.getvalue()


def run_example(name: str, output: Path, *options: str) -> str:
    """Run an example to its end and give what it prints."""
    done = subprocess.run(_command(name, output, options), capture_output=True, text=True, check=False, cwd=output)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def stop_example(name: str, output: Path, signum: signal.Signals, *options: str) -> str:
    """Run an example, send it a signal at the first win rate in training, and give what it prints.

    It must end as after that signal, and keep the policy.
    """
    process = subprocess.Popen(
        _command(name, output, (*options, "--max_steps", "100000", "--logging_steps", "1")),
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
        cwd=output,
    )
    assert process.stdout is not None
    watchdog = threading.Timer(TIMEOUT_S, process.kill)
    watchdog.start()
    lines: list[str] = []
    for line in process.stdout:  # tqdm's carriage returns count as line ends
        lines.append(line)
        if "win rate" in line or " wins " in line:
            process.send_signal(signum)
            break
    rest, _ = process.communicate()
    watchdog.cancel()
    printed = "".join(lines) + rest
    assert process.returncode == (0 if signum == signal.SIGINT else 128 + signum), printed[-2000:]
    assert "keeping the policy as it is now" in printed
    assert summary_of(output)["interrupted"] is True
    assert (output / "model" / "model.safetensors").exists()
    return printed


def assert_refused(name: str, output: Path, options: Sequence[str], message: str) -> None:
    """See an example refuse its options before anything is written."""
    with pytest.raises(ConfigError) as refused:
        call_example(name, output, *options)
    assert message in str(refused.value)
    assert not (output / "summary.json").exists()
