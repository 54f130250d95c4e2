"""Run ScienceWorld's simulator in Java, one JVM for many episodes; used in an engine's process."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from agentsgym.errors import EnvError

_OPTIONS = (
    "-XX:+UseSerialGC",  # one episode steps at a time: more threads only use memory
    # Identity hashes are then in the same order in every episode: without it, a circuit of the same wires is closed in
    # one episode and open in the next.
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
    # A full heap slows every episode in it to a crawl: Java exits instead, and the next episode restarts it.
    "-XX:+ExitOnOutOfMemoryError",
)


def find_java() -> str | None:
    """Locate the program: that of ``$JAVA_HOME`` if it is set, else that on the path; None if there is none."""
    home = os.environ.get("JAVA_HOME")
    program = Path(home) / "bin" / "java" if home else None
    return str(program) if program is not None and program.is_file() else shutil.which("java")


class JavaMachine:
    """A JVM with ScienceWorld's simulator.

    Args:
        memory_mb: The maximum heap size.

    Attributes:
        process: The process in which it runs.

    Raises:
        EnvError: Java does not start.
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
        except (OSError, ValueError) as error:  # it does not run, or prints something other than its port
            raise EnvError(f"Java does not start: {_complaint([java, *options])}") from error
        parameters = py4j.GatewayParameters(auto_field=True, port=port)
        self._gateway: Any = py4j.JavaGateway(gateway_parameters=parameters, java_process=self.process)

    def new_game(self) -> Any:
        """Make the interface of a separate episode."""
        return self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()


def _complaint(command: list[str]) -> str:
    """Run Java once more to capture its error message, in one line."""
    called = " ".join(command)
    try:
        done = subprocess.run([*command, "-version"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"{called}: {error}"
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return f"{called} -version ends with code {done.returncode} and prints: {' '.join(lines)}"


# Simplifications are global in a JVM, so episodes with different ones use different JVMs.
_machines: dict[tuple[str, int], JavaMachine] = {}


def java_machine(simplifications: str, memory_mb: int) -> JavaMachine:
    """Return this process's JVM for some simplifications; a new one if it has died."""
    key = (simplifications, memory_mb)
    machine = _machines.get(key)
    if machine is None or machine.process.poll() is not None:
        machine = _machines[key] = JavaMachine(memory_mb)
    return machine
