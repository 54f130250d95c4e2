"""Check an environment against the contract by playing it; users run this in their own tests."""

from __future__ import annotations

import logging
import pickle
import signal
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, cast

from agentsgym.agents.base import Agent, as_agent
from agentsgym.agents.exploring import ExploringAgent
from agentsgym.envs.base import MultistepEnv
from agentsgym.envs.check import rules
from agentsgym.envs.check.plays import Script, difference_of, first_changed_value, global_seed, record, replay
from agentsgym.envs.check.probe import EnvReport, HookProbe, place_of_tool
from agentsgym.envs.dataset_rows import tasks_of_rows
from agentsgym.envs.play import prepare_play
from agentsgym.envs.players import own_player
from agentsgym.envs.subclass import build
from agentsgym.errors import AgentsGymError, ConfigError, ContractError, TaskError
from agentsgym.fields import is_int, is_seconds, require
from agentsgym.interruptions import Interruption, attempt, is_interruption
from agentsgym.seeding import derive_seed
from agentsgym.texts import sentence_of, shown

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from agentsgym.types import Trajectory

_PLAYERS = ("random", "reference", "imitation")
_REPEAT_S = 1.0  # seconds between repetitions of an exceeded limit, for hooks that catch all exceptions
_MIN_SESSIONS = 4  # fewer would rarely interfere with each other
_REMEDY = "draw only from self.rng(session_id), and store what an episode needs in its state"


def check_env(  # noqa: PLR0913  # keywords, most of them left out
    env: MultistepEnv | type[MultistepEnv],
    tasks: Iterable[Mapping[str, Any]] | Dataset | None = None,
    agent: Any = None,
    *,
    env_config: dict[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
    max_tasks: int = 6,
    raise_on: Literal["error", "warning"] | None = "error",
    limit_s: float | None = None,
) -> EnvReport:
    """Play a few tasks of an environment repeatedly, and report where it breaks the contract.

    Every task is played alone. Then the same actions are replayed: alone, with other seeds of the global generators,
    with all sessions concurrently turn by turn, and in a pickled copy. The checks, by the names of their findings:
    ``deterministic`` (the same task and actions give the same episode, from the same state), ``global-random`` (no
    hook or tool uses Python's or NumPy's global generator), ``state-isolation`` (sessions do not affect each other),
    ``json-tasks``, ``finite-rewards``, ``done-sticks`` (an episode that is over stays over), ``prompt-purity`` (prompts
    do not repeat earlier messages), ``token-budget``, ``chat-template`` (text answers are recorded as the template
    renders them), ``tools`` (their schemas can be created, the chat template renders them, calls are parsed from their
    tokens as they were made, and not every call of one raises), ``roles`` (``info["rewards"]`` names existing roles,
    and is present if there are several), ``pickling``, ``failed`` (no episode fails) and ``time-limit``.

    Args:
        env: The environment, or its class.
        tasks: ``task_data`` dicts or dataset rows; None for the environment's first training tasks.
        agent: Any agent; None for an :class:`~agentsgym.agents.exploring.ExploringAgent`, which calls tools
            at random and repeats words of the prompts, and then for the environment's own players.
        env_config: Configuration, if ``env`` is a class.
        tokenizer: Tokenizer, if ``env`` is a class; with one, tokens and the chat template are checked too.
        seed: Seed of the agent, and of tasks without one.
        max_tasks: Maximum number of tasks; at least 4 sessions are played in any case.
        raise_on: The minimum severity of findings that raise an error; None to only return the findings.
        limit_s: Time limit in seconds; the line that is running when it is exceeded is reported. None for no limit.
            Works only on the main thread of a Unix process.

    Returns:
        The findings, errors first, each with the file and line of the hook concerned.

    Raises:
        ContractError: There are findings of that severity; its ``report`` has all findings.
        ConfigError: ``env`` or ``agent`` has the wrong type, there are no tasks, ``limit_s`` cannot work here, or
            the environment cannot play this many sessions concurrently.
    """
    require("max_tasks", max_tasks, is_int(1), "a positive int")
    require("raise_on", raise_on, lambda value: value in ("error", "warning", None), "'error', 'warning' or None")
    environment: Any = env
    if isinstance(env, type) and issubclass(cast("type", env), MultistepEnv):
        environment = build(env, tokenizer, env_config)
    elif not isinstance(environment, MultistepEnv):
        raise ConfigError(f"check_env requires an environment or its class, got {shown(environment)}")
    elif env_config is not None or tokenizer is not None:
        raise ConfigError("env_config and tokenizer can be passed only with a class, but env is an instance")
    actor = as_agent(ExploringAgent(seed=seed) if agent is None else agent)
    checker = _Checker(environment, actor)
    chosen = checker.playable(_first_tasks(environment, tasks, max_tasks), seed)
    with _quiet():
        if chosen and checker.tools_are_sound():
            prepare_play(environment.trials(chosen))  # one of the replays is concurrent
            checker.play_within(limit_s, chosen, seed)
    report = checker.report()
    serious = {"error": report.errors, "warning": report.findings}.get(raise_on or "", ())
    if serious:
        raise ContractError(f"{type(environment).__name__} breaks the contract: {report}", report)
    return report


class _Checker:
    """One check of one environment."""

    def __init__(self, env: MultistepEnv, agent: Agent) -> None:
        self._env, self._agent = env, agent
        self._probe = HookProbe(env)
        self._add = self._probe.add
        self._played: list[Trajectory] = []
        self._num_calls, self._call = 0, ""

    def report(self) -> EnvReport:
        """Return the findings, errors first."""
        findings = sorted(self._probe.findings.values(), key=lambda finding: finding.severity)
        num_turns = sum(one.num_turns for one in self._played)
        calls: dict[str, Any] = {"num_calls": self._num_calls, "call": self._call}
        return EnvReport(findings=findings, num_episodes=len(self._played), num_turns=num_turns, **calls)

    def playable(self, tasks: Sequence[Mapping[str, Any]], seed: int) -> list[dict[str, Any]]:
        """Return the playable tasks, each with a seed; few tasks are repeated with other seeds."""
        kept: list[dict[str, Any]] = []
        for index, task in enumerate(tasks):
            rules.check_task_data(task, f"task {index}", self._add)
            try:
                self._env.check_task(task, f"task {index}")
            except TaskError as error:
                reason = sentence_of(error)
                self._add("failed", "_check_task", f"task {index} is rejected: {reason}", about=reason)
            else:
                task_seed = task.get("seed")
                kept.append({**task, "seed": derive_seed("check", seed, index) if task_seed is None else task_seed})
        num_given = len(kept)
        while kept and len(kept) < _MIN_SESSIONS:
            kept.append({**kept[len(kept) % num_given], "seed": derive_seed("check again", seed, len(kept))})
        return kept

    def tools_are_sound(self) -> bool:
        """Whether the tools have schemas and their calls can be parsed, which is required for playing."""
        try:
            if self._env.tool_schemas:
                _ = self._env.chat_format
        except AgentsGymError as error:
            self._add("tools", "_tools", sentence_of(error))
            return False
        return True

    def play_within(self, limit_s: float | None, tasks: Sequence[Mapping[str, Any]], seed: int) -> None:
        """Play, and report the line that is running when the time limit is exceeded."""
        try:
            with _time_limit(limit_s):
                self.play(tasks, seed)
                self._probe.steps_again = False
                for kind in _PLAYERS if isinstance(self._agent, ExploringAgent) else ():
                    self._play_as(kind, tasks, seed)
                rules.check_calls(self._env, self._probe)
        except _OutOfTimeError as error:
            text = f"the check did not finish within {limit_s:g} s, when this line was running: make sure it returns"
            self._probe.add("time-limit", "", text, place=error.place)

    def play(self, tasks: Sequence[Mapping[str, Any]], seed: int) -> None:
        """Play the tasks in all ways, and compare the results."""
        env = self._env
        with self._probe, _globals(seed):
            alone, scripts = record(env, tasks, self._agent)
        self._played += alone
        with_answers = not isinstance(self._agent, ExploringAgent)  # its answers are unlike a policy's
        for trajectory in alone:
            rules.check_failure(trajectory, self._add)
            rules.check_prompts(trajectory, self._add)
            rules.check_tokens(env, trajectory, self._add, with_answers=with_answers)
        played = [one.messages for one in alone if one.turns and not one.failed]
        if played:
            rules.check_template(env, played[0], self._add)
        rules.check_tools(env, alone, self._add)
        self._num_calls, self._call = rules.read_back(env, alone, self._add)
        rules.check_roles(env, self._probe, alone)
        with _globals(seed):
            again = replay(env, tasks, scripts)
        self._played += again
        if self._are_equal("deterministic", "the same task, seed and actions gave a different episode", alone, again):
            self._compare(tasks, alone, scripts, seed)
        self._probe.steps_again = True
        with self._probe, _globals(seed):
            self._played += replay(env, tasks, scripts)
        self._compare_starts()

    def _play_as(self, kind: str, tasks: Sequence[Mapping[str, Any]], seed: int) -> None:
        """Play as one of the environment's own players, if it has this one."""
        player = attempt(own_player, self._env, kind, seed)
        if player is None or isinstance(player, ConfigError):  # none for this configuration
            return
        if isinstance(player, BaseException):
            self._add(
                "failed", f"{kind}_player", f"{kind}_player raised {type(player).__name__}: {sentence_of(player)}"
            )
            return
        with self._probe, _globals(seed, kind):
            played, _ = record(self._env, tasks, as_agent(player))
        self._played += played
        for trajectory in played:
            rules.check_failure(trajectory, self._add)

    def _compare_starts(self) -> None:
        """Find draws that did not affect these episodes, unless another check has found them."""
        change = first_changed_value(*self._probe.starts)
        if change is None or any(map(self._found, ("deterministic", "global-random", "state-isolation"))):
            return
        text = (
            f"the same task and seed gave different initial states, without effect on these episodes: {change}; an "
            f"episode that depends on it cannot be replayed: {_REMEDY}"
        )
        self._add("deterministic", "_initialize_episode", text, False)

    def _compare(
        self, tasks: Sequence[Mapping[str, Any]], alone: Sequence[Trajectory], scripts: Sequence[Script], seed: int
    ) -> None:
        """Play deterministic episodes under other conditions: reseeded, together, and in a pickled copy."""
        env = self._env
        with _globals(seed, "others"):
            reseeded = replay(env, tasks, scripts)
        with _globals(seed):
            together = replay(env, tasks, scripts, together=True)
        self._played += [*reseeded, *together]
        if not self._found("global-random"):
            text = "an episode changes when the global generators are reseeded"
            self._are_equal("global-random", text, alone, reseeded)
        if not self._found("global-random"):
            text = "an episode changes when others are played concurrently"
            self._are_equal("state-isolation", text, alone, together)
        name = type(env).__name__
        try:
            copied = pickle.loads(pickle.dumps(env))
        except BaseException as error:  # user code: __getstate__, __reduce__, __setstate__
            if is_interruption(error):
                raise
            text = f"{name} cannot be sent to worker processes: {type(error).__name__}: {sentence_of(error)}"
            self._add("pickling", "", text, False)
            return
        with _globals(seed):
            elsewhere = replay(copied, tasks, scripts)
        self._played += elsewhere
        difference = difference_of(alone, elsewhere)
        if difference is not None:
            where, _ = difference
            text = f"a pickled copy of {name}, as in a worker process, plays a different episode: {where}"
            self._add("pickling", "", text)

    def _found(self, check: str) -> bool:
        return any(known == check for known, *_ in self._probe.findings)

    def _are_equal(self, check: str, text: str, alone: Sequence[Trajectory], again: Sequence[Trajectory]) -> bool:
        """Add a finding if two plays of the same actions differ, and return whether they are equal.

        Its place is the hook that changes attributes of the environment, if any, or else the called tool.
        """
        difference = difference_of(alone, again)
        if difference is None:
            return True
        where, tools = difference
        text = f"{text}: {where}; {_REMEDY}"
        changed = self._probe.changed if check != "global-random" else {}
        if changed:
            kept = [f"self.{name} (in {hook})" for name, hook in changed.items()]
            text = f"{text}; hooks change {', '.join(kept[:3])}"
        place = "" if changed else place_of_tool(self._env, tools)
        self._probe.add(check, next(iter(changed.values()), "_initialize_episode"), text, place=place)
        return False


def _first_tasks(env: MultistepEnv, tasks: Any, max_tasks: int) -> list[dict[str, Any]]:
    if tasks is None:
        try:
            tasks = env.get_train_dataset()
        except NotImplementedError as error:
            raise ConfigError(f"check_env needs tasks: {error}") from error
    if isinstance(tasks, str | Mapping) or not isinstance(tasks, Iterable):
        raise ConfigError(
            f"tasks must be a list of task_data dicts or dataset rows, got {shown(cast('object', tasks))}"
        )
    return tasks_of_rows(env, list(islice(cast("Iterable[Any]", tasks), max_tasks)), "tasks")


def _globals(seed: int, *parts: str) -> AbstractContextManager[None]:
    """Seed the global generators with seeds that no environment would use by chance."""
    return global_seed(derive_seed("global generators", seed, *parts) % 2**32)


@contextmanager
def _quiet() -> Generator[None]:
    """Suppress the library's warnings, which the report covers."""
    logger = logging.getLogger("agentsgym")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _OutOfTimeError(Interruption):
    """The time limit was exceeded: an interruption, so that it is not recorded as an episode's failure.

    Attributes:
        place: File and line that were running at that moment.
    """

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


@contextmanager
def _time_limit(limit_s: float | None) -> Generator[None]:
    """Raise an exception inside the block when a time limit is exceeded; None for no limit.

    A signal handler raises it, as for Ctrl-C: this ends sleeping, waiting and Python loops, but not a computation in C.
    """
    if limit_s is None:
        yield
        return
    require("limit_s", limit_s, is_seconds, "a positive number or None")
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        raise ConfigError("limit_s needs a timer signal, which is available only in the main thread of a Unix process")

    def stop(_: int, frame: FrameType | None) -> None:
        caller = frame
        while caller is not None and caller.f_code.co_filename == threading.__file__:  # waits inside the library
            caller = caller.f_back
        caller = caller or frame
        raise _OutOfTimeError("" if caller is None else f"{caller.f_code.co_filename}:{caller.f_lineno}")

    handler = signal.signal(signal.SIGALRM, stop)
    before = signal.setitimer(signal.ITIMER_REAL, limit_s, _REPEAT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)
