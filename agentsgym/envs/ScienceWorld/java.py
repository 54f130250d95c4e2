"""Run ScienceWorld's simulator in Java, many episodes per JVM; used in an engine's process."""

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
