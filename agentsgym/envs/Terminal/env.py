"""Solve tasks about files, texts and small programs with commands of a shell."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.contract import State, Stepped
from agentsgym.envs.datasets.options import DrawnOptions, Part, checked_options, drawn_dataset, drawn_options, task_seed
from agentsgym.envs.Terminal import SPEC
from agentsgym.envs.Terminal.checks import Folder, Returns
from agentsgym.envs.Terminal.launch import HOME
from agentsgym.envs.Terminal.shell import ISOLATIONS, Result, Sandbox, Shell, isolation_for, printable
from agentsgym.envs.Terminal.tasks import FAMILIES, GROUPS, LEVELS, Task, make_task
from agentsgym.errors import ConfigError, TaskError
from agentsgym.fields import Field, choice_field, is_int, is_seconds, is_strings, one_of, or_none, require

if TYPE_CHECKING:
    from datasets import Dataset

_SYSTEM_PROMPT = (
    "You work in a folder with a bash shell. In each turn, write one command, or one fenced code block with several "
    "lines, and nothing else; its output is returned. Commands cannot read input. When the task is done, write submit."
)
_HOW_TO_ANSWER = "Write one command, or one fenced code block with commands, or submit."
_BLOCK = re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.DOTALL)
# Prints one line of JSON for each call, [value] or [], and discards what the agent's code prints.
_CALLER = """
import json, os, sys
answers, null = os.fdopen(os.dup(1), "w"), os.open(os.devnull, os.O_WRONLY)
os.dup2(null, 1), os.dup2(null, 2)
path, function, calls = json.loads(sys.argv[1])
names = {"__name__": "module"}
sys.path.insert(0, os.getcwd())
exec(compile(open(path, "rb").read(), path, "exec"), names)
for call in calls:
    try:
        answer = json.dumps([names[function](*call)])
    except Exception:
        answer = "[]"
    print(answer, file=answers, flush=True)
"""
_MAX_ANSWER_BYTES = 1 << 16


def _is_level(value: Any) -> bool:
    return is_int(1)(value) and value in LEVELS


class TerminalOptions(DrawnOptions, total=False):
    """Options of the datasets.

    Attributes:
        families: Names of families or groups of tasks; None for all.
        level: The level of difficulty, 1 to 3; None for all.
    """

    families: Sequence[str] | None
    level: int | None


_OPTIONS: Mapping[str, Field] = {
    "families": Field(
        default=None,
        expected=f"None or a non-empty list of names from {', '.join([*GROUPS, *FAMILIES])}",
        valid=or_none(lambda value: is_strings(value) and len(value) > 0 and {*value} <= {*GROUPS, *FAMILIES}),
    ),
    "level": Field(default=None, expected="1, 2, 3 or None", valid=or_none(_is_level)),
}


class TerminalEnv(MultistepEnv):
    """Solve a task in a folder with commands of a shell; each turn is rewarded for its progress.

    A task is ``{"family": "rename", "level": 2, "part": "train", "seed": 7}``: files, an instruction, and checks of the
    result, drawn from these values. :meth:`tasks` draws such tasks. Progress is the fraction of the checks
    achieved, minus the fraction broken of those that held at the start: from 0 at the start to 1. A turn is rewarded
    with its change, and with another 1 (the named reward ``success``) when all checks pass. An episode ends when the
    agent writes ``submit``, or at the turn limit. On Windows, the constructor raises ``ConfigError``.

    Keys of ``env_config`` in addition to the common ones:

    - ``reward``: ``"progress"`` (the change of the progress, and 1 for success) or ``"success"`` (only the latter).
    - ``command_timeout_s``: the time in seconds after which a command is killed.
    - ``max_output_bytes``: how much of a command's output is shown: half from its beginning, half from its end.
    - ``memory_mb``: the address space of each process, in MiB.
    - ``isolation``: ``"namespaces"``, ``"user"`` or ``"none"``, as described in SECURITY.md, or ``"auto"`` for the
      first of the former two that works on this machine.
    """

    spec = SPEC
    config_fields: ClassVar[Mapping[str, Field]] = {
        "reward": choice_field("progress", "success"),
        "command_timeout_s": Field(default=10.0, expected="a positive number of seconds", valid=is_seconds),
        "max_output_bytes": Field(default=4000, expected="an int of at least 100", valid=is_int(100)),
        "memory_mb": Field(default=1024, expected="an int of at least 64", valid=is_int(64)),
        "isolation": choice_field("auto", *ISOLATIONS),
    }
    default_config: ClassVar[Mapping[str, Any]] = {"max_steps_per_episode": 12, "error_allowance": 3}
    task_fields = ("family", "level", "part")

    def tasks(self, count: int, *, seed: int = 0, part: Part = "train", **options: Any) -> list[dict[str, Any]]:
        """Draw tasks, with equal numbers of all families, and of all levels.

        Args:
            count: The number of tasks, at least 1.
            seed: The random seed; equal seeds give equal tasks.
            part: ``"train"`` or ``"eval"``, which have different seeds, names in the files, and programs.
            **options: ``families`` and ``level``, as in :class:`TerminalOptions`.

        Raises:
            ConfigError: ``count`` or an option is invalid.
        """
        settings = checked_options({"size": count, "seed": seed, **options}, {**drawn_options(1000), **_OPTIONS})
        given = settings["families"] or FAMILIES
        families = [*dict.fromkeys(family for name in given for family in GROUPS.get(name, (name,)))]
        levels = LEVELS if settings["level"] is None else (settings["level"],)
        return [
            {
                "family": families[index % len(families)],
                "level": levels[index // len(families) % len(levels)],
                "part": part,
                "seed": task_seed(part, "terminal", seed, index),
            }
            for index in range(count)
        ]

    def _check_config(self, config: dict[str, Any]) -> None:
        if sys.platform == "win32":
            raise ConfigError("TerminalEnv requires Linux or macOS, since it runs bash; on Windows, use it inside WSL")

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        family, level, part = task_data.get("family"), task_data.get("level"), task_data.get("part", "train")
        require("task_data['family']", family, one_of(*FAMILIES), f"one of {', '.join(FAMILIES)}", TaskError)
        require("task_data['level']", level, _is_level, "1, 2 or 3", TaskError)
        require("task_data['part']", part, one_of("train", "eval"), "'train' or 'eval'", TaskError)

    def _prepare_play(self, tasks: Sequence[Mapping[str, Any]], num_live: int) -> None:
        isolation_for(self.env_config["isolation"])

    async def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        task = make_task(task_data["family"], task_data["level"], task_data.get("part", "train"), task_data["seed"])
        config = self.env_config
        sandbox = Sandbox(isolation_for(config["isolation"]), config["memory_mb"])
        shell = Shell(sandbox, config["max_output_bytes"])
        state: State = {"done": False, "task": task, "sandbox": sandbox, "shell": shell, "results": {}}
        try:
            sandbox.write(task.files)
            await shell.start()
            state["at_start"] = state["passed"] = await self._passed(state)
        except BaseException:
            await self._close_episode(session_id, state)
            raise
        return {**state, "reply": f"{task.instruction}\n\n{_prompt(shell, sandbox)}"}

    def _format_prompt(self, state: State, step: int) -> str:
        return state["reply"]

    async def _step_episode(self, session_id: str, state: State, action: str) -> Stepped:
        command, was_solved = read_command(action), all(state["passed"])
        problem = _problem_of(command)
        state = {**state}
        if problem is not None:
            state["reply"] = f"[{problem}] {_HOW_TO_ANSWER}\n{_prompt(state['shell'], state['sandbox'])}"
        elif command != "submit":
            result: Result = await state["shell"].run(command, self.env_config["command_timeout_s"])
            state["reply"] = f"{_described(result)}{_prompt(state['shell'], state['sandbox'])}"
            state["passed"] = await self._passed(state)
        is_solved = all(state["passed"])
        info = {"success": is_solved, "progress": _progress(state), "isolation": state["sandbox"].isolation}
        reward = {"success": float(is_solved) - float(was_solved)}
        return state, reward, command == "submit", {**info, "invalid": problem is not None}

    async def _close_episode(self, session_id: str, state: State) -> None:
        try:
            await state["shell"].stop()
        finally:
            await asyncio.to_thread(state["sandbox"].remove)

    def _score_state(self, state: State) -> float:
        return _progress(state) if self.env_config["reward"] == "progress" else 0.0

    def _potential(self, state: State) -> float:
        return _progress(state)

    def _system_prompt(self) -> str:
        return _SYSTEM_PROMPT

    async def _passed(self, state: State) -> list[bool]:
        """Evaluate the checks of a state's task."""
        task: Task = state["task"]
        folder = Folder(state["sandbox"].home)
        passed: list[bool] = []
        for check in task.checks:
            is_call = isinstance(check, Returns)
            passed += await self._returned(state, check, folder) if is_call else [check.holds(folder)]
        return passed

    async def _returned(self, state: State, check: Returns, folder: Folder) -> list[bool]:
        """Call the agent's function in a separate shell, if its file has changed; return which values are right."""
        content, known = folder.read(check.path), state["results"].get(check.path)
        if known is not None and known[0] == content:
            return known[1]
        answers: list[Any] = []
        if content is not None:
            shell = Shell(state["sandbox"], _MAX_ANSWER_BYTES)
            arguments = json.dumps([check.path, check.function, check.calls])
            try:
                await shell.start()
                command = shlex.join(["python3", "-I", "-B", "-c", _CALLER, arguments])
                result = await shell.run(command, self.env_config["command_timeout_s"])
            finally:
                await shell.stop()
            answers = [_json_or_none(line) for line in result.output.splitlines()]
        answers += [None] * len(check.calls)
        right = [answer == [value] for answer, value in zip(answers, check.expected, strict=False)]
        state["results"] = {**state["results"], check.path: (content, right)}
        return right

    @classmethod
    def get_train_dataset(  # type: ignore[override]
        cls, env_config: dict[str, Any] | None = None, **options: Unpack[TerminalOptions]
    ) -> Dataset:
        """Return rows to train on; the options are those of :class:`TerminalOptions` (1000 rows by default)."""
        return drawn_dataset(cls, env_config, "train", options, **_OPTIONS)

    @classmethod
    def get_eval_dataset(  # type: ignore[override]
        cls, env_config: dict[str, Any] | None = None, **options: Unpack[TerminalOptions]
    ) -> Dataset:
        """Return rows to evaluate on, with other names and programs; otherwise like :meth:`get_train_dataset`."""
        return drawn_dataset(cls, env_config, "eval", options, **_OPTIONS)


def read_command(text: str) -> str | None:
    r"""Return the command in an answer: its fenced block or, without one, all of it; None if it has several blocks.

    >>> read_command("ls -l "), read_command("I look:\n```bash\ncd a\nls\n```")
    ('ls -l', 'cd a\nls')
    """
    blocks = _BLOCK.findall(text)
    return None if len(blocks) > 1 else (blocks[0] if blocks else text).strip()


def _problem_of(command: str | None) -> str | None:
    if command is None:
        return "there is more than one code block"
    if not command:
        return "the command is empty"
    return "a command cannot contain NUL characters" if "\0" in command else None


def _progress(state: State) -> float:
    """Return the fraction of the checks that has been achieved, minus the fraction of the others that broke."""
    changes = [*zip(state["at_start"], state["passed"], strict=True)]
    achieved = [now for before, now in changes if not before]
    broken = [not now for before, now in changes if before]
    return sum(achieved) / len(achieved) - sum(broken) / max(1, len(broken))


def _prompt(shell: Shell, sandbox: Sandbox) -> str:
    folder = sandbox.masked(printable(os.fsencode(shell.folder)))
    is_home = folder == HOME or folder.startswith(f"{HOME}/")
    return f"{'~' + folder.removeprefix(HOME) if is_home else folder}$"


def _described(result: Result) -> str:
    output = result.output if not result.output or result.output.endswith("\n") else f"{result.output}\n"
    if result.note:
        return f"{output}[{result.note}]\n"
    return f"{output}[exit status {result.status}]\n" if result.status else output


def _json_or_none(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
