"""Environments in processes: sent once, replaced when they hang or crash, their other sessions played again."""

import dataclasses
import multiprocessing
import pickle
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from playground import AsyncParrot, Parrot, Playground, tasks, texts

from agentsgym import Action, ConfigError, EnvProcessPool, StopReason, ToolCall, Trajectory
from agentsgym.rollouts.workers.wire import WireAction, to_wire
from agentsgym.testing import chat_tokenizer

ROOT = Path(__file__).parent.parent.parent
TOKENIZER = chat_tokenizer()


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvProcessPool]:
    with EnvProcessPool(2) as pool:
        yield pool


@pytest.fixture(params=[Parrot, AsyncParrot])
def agent(request: pytest.FixtureRequest) -> Any:
    return request.param()


def anonymous(trajectory: Trajectory) -> Trajectory:
    return dataclasses.replace(trajectory, session_id="", task_index=0)


def process_ids(pool: EnvProcessPool) -> list[int]:
    return [worker.process.pid for worker in pool.workers()]


def test_a_process_keeps_nothing_of_episodes_that_are_over(agent: Any) -> None:
    def sizes(pool: EnvProcessPool) -> dict[str, int]:
        (worker,) = pool.workers()
        return {name: len(value) for name, value in vars(worker).items() if isinstance(value, set | dict | list)}

    env = Playground(TOKENIZER)
    with EnvProcessPool(1) as pool:
        found = []
        for num_episodes in (2, 20):
            env.rollout(tasks(*["a stop"] * num_episodes), agent, pool=pool)
            found.append(sizes(pool))
    assert found[0]["hosted"] == 2  # all that it takes to know that no one was alone there
    assert found[1] == found[0]


def test_a_process_receives_the_whole_action_except_for_the_agents_state() -> None:
    action = Action(
        text="look",
        token_ids=[7],
        logprobs=[-0.5],
        agent_state=object(),
        finish_reason="length",
        tool_calls=(ToolCall(name="look", arguments={}),),
        reasoning="where am I?",
        policy_version=3,
    )
    given = to_wire(action, "a session")
    assert isinstance(given, WireAction)
    assert given.action() == dataclasses.replace(action, agent_state=True)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("exit", "its environment's process died (exit code 7)"),
        ("crash", "its environment's process died (signal SIGSEGV)"),
        ("hang", "the environment took longer than turn_timeout_s = 1"),
    ],
)
def test_only_the_session_that_broke_its_process_fails(word: str, why: str, agent: Any, pool: EnvProcessPool) -> None:
    env = Playground(TOKENIZER)
    scripts = ("a b stop", f"a b {word} c", "a b c d e stop", "x y z u v stop")  # 1 and 3 live in one process
    wanted = env.rollout(tasks(*scripts[:1], "stop", *scripts[2:]), Parrot())
    given = env.rollout(tasks(*scripts), agent, pool=pool, turn_timeout_s=1)
    for index in (0, 2, 3):
        assert anonymous(given[index]) == anonymous(wanted[index])
    broken = given[1]
    assert broken.stop_reason is StopReason.FAILED
    assert f"session {broken.session_id}, turn 2: {why}" in str(broken.error)
    assert [texts(broken)[turn] for turn in range(len(broken.turns))] == ["a", "b"]
    assert [turn.reward for turn in broken.turns] == [1.0, 1.0]


def test_a_session_that_breaks_its_process_at_birth_fails_alone(agent: Any, pool: EnvProcessPool) -> None:
    unborn, other, third = Playground().rollout(tasks("unborn", "a stop", "b stop"), agent, pool=pool)
    assert "turn 0: its environment's process died (exit code 9)" in str(unborn.error)
    assert (list(unborn.turns), list(unborn.messages)) == ([], [])
    assert [texts(other), texts(third)] == [["a", "stop"], ["b", "stop"]]


def test_a_session_that_cannot_be_played_again_fails_with_a_sentence(agent: Any) -> None:
    """It saw its process's id, and sees another one when it is played again."""
    with EnvProcessPool(1) as pool:
        unsteady, broken = Playground().rollout(tasks("pid a b c d stop", "a b exit"), agent, pool=pool)
    assert "and replaying its" in str(unsteady.error)
    assert "an environment must be deterministic given task, seed and actions" in str(unsteady.error)
    assert "exit code 7" in str(broken.error)


def test_an_episode_that_is_too_old_is_killed_and_the_others_are_not(pool: EnvProcessPool) -> None:
    played = Playground().rollout(
        tasks("a hang", "a stop", "b stop"), AsyncParrot(), pool=pool, max_concurrent=2, episode_timeout_s=2
    )
    assert [one.failed for one in played] == [True, False, False]
    assert "turn 1: the trial took longer than episode_timeout_s = 2" in str(played[0].error)


def test_processes_and_environments_are_kept_from_one_rollout_to_the_next(pool: EnvProcessPool) -> None:
    env = Sent(TOKENIZER)
    env.rollout(tasks("a stop", "b stop", "c stop"), Parrot(), pool=pool)
    before = process_ids(pool)
    env.rollout(tasks("a stop", "b stop", "c stop"), Parrot(), pool=pool)
    assert process_ids(pool) == before
    [counts] = {tuple(one.info["counts"]) for one in env.rollout(tasks("a stop", "b stop"), Parrot(), pool=pool)}
    assert counts == (1,)  # unpickled once in each process


def test_what_changed_on_the_environment_between_rollouts_is_sent(pool: EnvProcessPool) -> None:
    env = Playground()
    assert len(env.rollout(tasks("a b c d"), Parrot(), pool=pool)[0].turns) == 20
    env.env_config["max_steps_per_episode"] = 3
    assert len(env.rollout(tasks("a b c d"), Parrot(), pool=pool)[0].turns) == 3
    env.env_config["max_steps_per_episode"] = 20
    assert len(env.rollout(tasks("a b c d"), Parrot(), pool=pool)[0].turns) == 20


class Sent(Playground):
    """Counts how often it was unpickled where it is."""

    count = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        type(self).count += 1

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        state, reward, done, info = super()._step_episode(session_id, state, action)
        return state, reward, done, {**info, "counts": [self.count]}


def test_what_cannot_be_pickled_is_reported(pool: EnvProcessPool) -> None:
    env = Playground()
    env.secret = lambda: 0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"an EnvProcessPool sends environments .* Playground cannot be pickled: "):
        env.rollout(tasks("a stop"), Parrot(), pool=pool)
    assert texts(Playground().rollout(tasks("a stop"), Parrot(), pool=pool)[0]) == ["a", "stop"]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("dumps", "its task could not be sent to its process: TypeError: no dump"),
        ("dumps and exits", "its task could not be sent to its process: SystemExit"),
        ("loads", "its process could not unpickle the task: ValueError: invalid literal"),
        ("loads and exits", "its process could not unpickle the task: SystemExit: bye"),
    ],
)
def test_a_task_that_cannot_be_sent_or_read_fails_its_session_alone(
    fault: str, why: str, agent: Any, pool: EnvProcessPool
) -> None:
    given = [{"script": "a stop"}, {"script": "a stop", "given": Unsteady(fault)}, {"script": "b stop"}]
    whole, failed, other = Playground().rollout(given, agent, pool=pool)
    assert [texts(whole), texts(other)] == [["a", "stop"], ["b", "stop"]]
    assert failed.task_index == 1
    assert why in str(failed.error)
    assert "create the objects in _initialize_episode" in str(failed.error)


class Unsteady:
    """Breaks where it is pickled or unpickled."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __deepcopy__(self, _: Any) -> "Unsteady":
        return self

    def __reduce__(self) -> Any:
        if self.fault == "dumps":
            raise TypeError("no dump")
        if self.fault == "dumps and exits":
            raise SystemExit
        return (int, ("no number",)) if self.fault == "loads" else (sys.exit, ("bye",))


def test_a_result_that_cannot_be_sent_fails_its_session(agent: Any, pool: EnvProcessPool) -> None:
    secret, other = Playground().rollout(
        [{"script": "a secret", "seed": 0}, {"script": "b stop", "seed": 0}], agent, pool=pool
    )
    assert "its process could not send the result" in str(secret.error)
    assert other.stop_reason is StopReason.DONE


def test_an_environment_of_a_module_that_processes_cannot_import(
    pool: EnvProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = types.ModuleType("cells")
    notebook.Cell = type("Cell", (Playground,), {"__module__": "cells"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cells", notebook)
    with pytest.raises(
        ConfigError, match=r"could not unpickle an environment: .*cells.*module that can be imported, not in a note"
    ):
        notebook.Cell().rollout(tasks("stop"), Parrot(), pool=pool)  # type: ignore[attr-defined]
    assert texts(Playground().rollout(tasks("a stop"), Parrot(), pool=pool)[0]) == ["a", "stop"]


def test_a_pool_is_for_one_rollout_at_a_time(pool: EnvProcessPool) -> None:
    def play_another(_: Any) -> None:
        Playground().rollout(tasks("stop"), Parrot(), pool=pool)

    with pytest.raises(ConfigError, match="plays one rollout at a time"):
        Playground().rollout(tasks("a stop"), Parrot(), pool=pool, on_finish=play_another)


def test_a_pool_in_use_cannot_be_closed(agent: Any, pool: EnvProcessPool) -> None:
    with pytest.raises(ConfigError, match="cannot be closed while a rollout uses it"):
        Playground().rollout(tasks("stop"), agent, pool=pool, on_finish=lambda _: pool.close())
    assert texts(Playground().rollout(tasks("a stop"), agent, pool=pool)[0]) == ["a", "stop"]


def test_episodes_that_hang_while_others_wait_for_their_process_end(agent: Any) -> None:
    with EnvProcessPool(1) as pool:
        Playground().rollout(tasks("stop"), Parrot(), pool=pool)
        played = Playground().rollout(tasks(*["a hang"] * 3), agent, pool=pool, episode_timeout_s=0.5)
    assert all("the trial took longer than episode_timeout_s = 0.5" in str(one.error) for one in played)


def test_the_time_that_a_process_takes_to_begin_is_not_its_episodes() -> None:
    with EnvProcessPool(1) as pool:
        played = SlowToLoad().rollout(tasks("a stop", "b stop"), Parrot(), pool=pool, episode_timeout_s=0.5)
        late = Playground().rollout(tasks("a hang"), Parrot(), pool=pool, episode_timeout_s=0.5)
    assert [texts(one) for one in played] == [["a", "stop"], ["b", "stop"]]
    assert late[0].failed


class SlowToLoad(Playground):
    """Takes its time in a new process, as one whose module imports much."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(1.5)
        super().__setstate__(state)


def test_a_broken_off_run_leaves_no_process_and_no_thread() -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    others = set(multiprocessing.active_children())
    with EnvProcessPool(2) as pool:
        with pytest.raises(KeyboardInterrupt):
            Playground().rollout(tasks("stop", "hang"), Parrot(), pool=pool, on_finish=interrupt)
        with pytest.raises(KeyboardInterrupt):
            Playground().rollout(tasks("stop", "a b c d"), Parrot(), pool=pool, on_finish=interrupt)
        mine = set(multiprocessing.active_children()) - others
        readers = [worker._reader for worker in pool.workers()]
    assert mine
    assert not any(process.is_alive() for process in mine)
    assert not any(reader in threading.enumerate() for reader in readers)


@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
@pytest.mark.parametrize("last", ["stop", "crash", "hang"])
def test_what_an_environment_has_started_ends_with_its_process(last: str) -> None:
    with EnvProcessPool(1) as pool:
        [played] = Playground().rollout(tasks(f"start a {last}"), Parrot(), pool=pool, turn_timeout_s=1)
    [shown] = [message["content"] for message in played.messages if message["content"].startswith("start: ")]
    started = int(shown.removeprefix("start: "))
    psutil.wait_procs([psutil.Process(started)] if psutil.pid_exists(started) else [], timeout=20)
    assert not psutil.pid_exists(started)


def test_a_bug_in_a_process_ends_the_run_and_names_its_place(pool: EnvProcessPool) -> None:
    with pytest.raises(RuntimeError, match="a bug of ours") as raised:
        Buggy().rollout(tasks("a stop", "stop"), Parrot(), pool=pool)
    assert "in start_session" in raised.value.__notes__[0]


class Buggy(Playground):
    """Breaks outside of what may be an episode's fault."""

    def start_session(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("a bug of ours")


def test_a_pickled_environment_leaves_its_sessions_at_home() -> None:
    env = Playground(TOKENIZER)
    env.active_states["x"] = {"done": False, "handle": lambda: 0}
    copied = pickle.loads(pickle.dumps(env))
    assert (copied.active_states, copied.env_config) == ({}, env.env_config)
    assert copied.chat_format.stop_token_ids == env.chat_format.stop_token_ids  # type: ignore[union-attr]


SCRIPT = """
from agentsgym import ScriptedAgent
from agentsgym.envs.TwentyQuestions.env import TwentyQuestionsEnv
from agentsgym.rollouts.process_pool import EnvProcessPool

def main():
    with EnvProcessPool(1) as pool:
        agent = ScriptedAgent(["Is it a clock?"])
        [game] = TwentyQuestionsEnv().rollout([{"solution": "clock", "seed": 1}], agent, pool=pool)
        print("won", game.success)
"""


@pytest.mark.parametrize("guard", [True, False])
def test_a_script_must_start_its_pool_below_the_guard(guard: bool, tmp_path: Path) -> None:
    script = tmp_path / "play.py"
    script.write_text(SCRIPT + ('\nif __name__ == "__main__":\n    main()\n' if guard else "\nmain()\n"))
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert run.stdout == ("won True\n" if guard else "")
    if not guard:
        assert '(often the script creates the pool outside `if __name__ == "__main__":`)' in run.stderr
