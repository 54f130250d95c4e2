"""Run one ScienceWorld episode, in a JVM that many share; used in an engine's process."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from agentsgym.errors import EnvError

_OPTIONS = (
    "-XX:+UseSerialGC",  # one episode steps at a time, so more threads would only use memory
    # Make identity hashes deterministic. Otherwise their order varies between episodes, and a circuit of the same wires
    # may be closed in one episode and open in the next.
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
    # A full heap would slow every episode in the JVM to a crawl; instead Java exits, and the next episode restarts it.
    "-XX:+ExitOnOutOfMemoryError",
)


def find_java() -> str | None:
    """Locate the ``java`` program in ``$JAVA_HOME``, otherwise on the path; None if there is none."""
    home = os.environ.get("JAVA_HOME")
    program = Path(home) / "bin" / "java" if home else None
    return str(program) if program is not None and program.is_file() else shutil.which("java")


class JavaMachine:
    """A JVM with ScienceWorld's simulator.

    Attributes:
        process: The JVM's process.

    Raises:
        EnvError: Java could not be started.
    """

    def __init__(self, memory_mb: int) -> None:
        logging.getLogger().addHandler(logging.NullHandler())  # without a handler, py4j prints its exceptions
        py4j = importlib.import_module("py4j.java_gateway")
        constants = importlib.import_module("scienceworld.constants")
        java, options = find_java() or "java", [f"-Xmx{memory_mb}m", *_OPTIONS]
        try:
            port, self.process = py4j.launch_gateway(
                classpath=constants.JAR_PATH,
                die_on_exit=True,
                cwd=constants.BASEPATH,
                return_proc=True,
                javaopts=options,
                java_path=java,
            )
        except (OSError, ValueError) as error:  # Java does not run, or prints something other than its port
            raise EnvError(f"Java could not be started: {_diagnose([java, *options])}") from error
        parameters = py4j.GatewayParameters(auto_field=True, port=port)
        self._gateway: Any = py4j.JavaGateway(gateway_parameters=parameters, java_process=self.process)

    def new_game(self) -> Any:
        """Create the interface to a new episode."""
        return self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()


def _diagnose(command: list[str]) -> str:
    """Run Java again to capture its error message, as one line."""
    program = " ".join(command)
    try:
        done = subprocess.run([*command, "-version"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"{program}: {error}"
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return f"`{program} -version` exited with code {done.returncode} and printed: {' '.join(lines)}"


# Simplifications are global in a JVM, so episodes with different simplifications need different JVMs.
_machines: dict[tuple[str, int], JavaMachine] = {}


def java_machine(simplifications: str, memory_mb: int) -> JavaMachine:
    """Return this process's JVM for these simplifications, starting one if there is none or it has died."""
    key = (simplifications, memory_mb)
    machine = _machines.get(key)
    if machine is None or machine.process.poll() is not None:
        machine = _machines[key] = JavaMachine(memory_mb)
    return machine


_NOT_UNDERSTOOD = ("No known action matches", "Unknown action")


class ScienceWorldEngine:
    """Runs one episode at a time; see :mod:`agentsgym.envs.shared.engines`.

    The argument of ``start`` has the keys ``task``, ``variation``, ``simplifications`` (joined by commas),
    ``memory_mb``, ``gold_path`` and ``admissible_commands`` (whether to compute these, which is slow).
    """

    def __init__(self) -> None:
        self._machine: JavaMachine | None = None
        self._game: Any = None
        self._lists_commands = False

    def start(self, game: dict[str, Any]) -> dict[str, Any]:
        """Load the task and run the first command, ``look around``."""
        machine = java_machine(game["simplifications"], game["memory_mb"])
        if machine is not self._machine:
            self._machine, self._game = machine, machine.new_game()
        self._lists_commands = game["admissible_commands"]
        self._game.load(game["task"], game["variation"], game["simplifications"], game["gold_path"])
        walkthrough: list[str] = []
        if game["gold_path"]:
            walkthrough = list(self._game.getGoldActionSequence())
            self._game.reset()  # computing the gold path plays the episode
        text = self._game.step("look around")
        return {
            "text": f"{self._game.freeActionTaskDesc().strip()}\n\n{text.strip()}",
            "walkthrough": walkthrough,
            **self._common_response(),
        }

    def step(self, command: str) -> dict[str, Any]:
        """Run one command."""
        text = self._game.step(command).strip()
        return {"text": text, "understood": not text.startswith(_NOT_UNDERSTOOD), **self._common_response()}

    def close(self) -> None:
        """Release the episode; the JVM continues to run other episodes."""
        self._game = self._machine = None

    def _common_response(self) -> dict[str, Any]:
        """Return the part of a response that ``start`` and ``step`` share."""
        game = self._game
        score = round(game.getScore(), 2)  # at most 1, in steps of 0.01; -1 for a failed task
        done = bool(game.getCompleted()) or score < 0
        won = done and score >= 1
        commands: list[str] = []
        if self._lists_commands and not done:
            valid = game.getValidActionObjectCombinations()
            commands = sorted(command for command in valid if not command.startswith("reset"))
        # The visible objects, the inventory, and the goals met.
        position = (game.freeActionLook(), game.freeActionInventory(), game.getGoalProgressStr(), str(score))
        return {
            "admissible": commands,
            "policy": [],
            "won": won,
            "lost": done and not won,
            "score": score,
            "progress": max(0.0, score),
            "key": hashlib.blake2b("\n".join(position).encode(), digest_size=12).hexdigest(),
        }
