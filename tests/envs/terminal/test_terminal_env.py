"""Episodes in the terminal: solved by the reference player, rewarded by progress, replayed exactly, many at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from terminal_leaks import nothing_left

from agentsgym import Agent, ConfigError, ScriptedAgent, StopReason, evaluate
from agentsgym.envs.Terminal import RandomPlayer, ReferencePlayer, TerminalEnv
from agentsgym.envs.Terminal.shell import isolation_for
from agentsgym.envs.Terminal.tasks import FAMILIES, make_task
from agentsgym.types import Trajectory

try:
    AUTO = isolation_for("auto")
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

TASK = {"family": "rename", "level": 2, "part": "train", "seed": 7}
SOLUTION = make_task("rename", 2, "train", 7).solution


@pytest.fixture(autouse=True)
def leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No folder and no process is left by a test."""
    with nothing_left(monkeypatch):
        yield


def env_of(**config: Any) -> TerminalEnv:
    """An environment with a generous time limit."""
    return TerminalEnv(env_config={"command_timeout_s": 60.0, **config})


def played(commands: Sequence[str], task: Any = TASK, **config: Any) -> Trajectory:
    """One episode with these commands."""
    [trajectory] = env_of(**config).rollout([task], ScriptedAgent([*commands, "submit"]))
    assert not trajectory.failed, trajectory.error
    return trajectory


def replies(trajectory: Trajectory) -> list[str]:
    """What the environment wrote, after the instruction."""
    return [one["content"] for one in trajectory.messages if one["role"] == "user"][1:]


@pytest.mark.parametrize("part", ["train", "eval"])
def test_the_reference_player_solves_every_family_and_level_and_beats_random_play(part: Any) -> None:
    env = env_of()
    tasks = env.tasks(3 * len(FAMILIES), part=part, seed=os.getpid() % 1000)
    solved = env.rollout(tasks, ReferencePlayer(env))
    assert [(one.success, one.error) for one in solved] == [(True, None)] * len(tasks), tasks
    assert [one.final_reward for one in solved] == pytest.approx([2.0] * len(tasks))
    guessed = env.rollout(tasks[: len(FAMILIES)], RandomPlayer(env))
    assert not any(one.failed for one in guessed)
    assert all(one.final_reward < 2.0 for one in guessed)
    assert {one.info["isolation"] for one in solved} == {AUTO}


def test_an_episode_reads_like_a_terminal() -> None:
    trajectory = played(["ls", "cd marble && false", "", "```\necho a\npwd\n```"])
    system, first, *_ = trajectory.messages
    assert system["role"] == "system"
    assert "submit" in system["content"]
    assert first["content"] == make_task("rename", 2, "train", 7).instruction + "\n\n~$"
    listing, failed, empty, block = replies(trajectory)
    assert listing.endswith("\n~$")
    assert failed == "bash: line 4: cd: marble: No such file or directory\n[exit status 1]\n~$"
    assert empty == "[the command is empty] Write one command, or one fenced code block with commands, or submit.\n~$"
    assert block == "a\n/home/agent\n~$"
    assert [turn.invalid for turn in trajectory.turns] == [False, False, True, False, False]
    assert trajectory.stop_reason is StopReason.DONE


def test_rewards_are_the_changes_of_progress_and_success() -> None:
    [folder] = {path.partition("/")[0] for path in make_task("rename", 2, "train", 7).files}
    renamed = sorted(check.path for check in make_task("rename", 2, "train", 7).checks if getattr(check, "gone", ""))
    undo = [f"mv '{renamed[0]}' x", f"mv x '{renamed[0]}'"]
    trajectory = played([*SOLUTION, *undo, f"rm -r {folder}"])
    part = 1 / len(renamed)
    assert trajectory.turn_rewards == pytest.approx([2.0, -part - 1, part + 1, -3.0, 0.0])
    assert trajectory.final_components == pytest.approx({"progress": -1.0, "success": 0.0})
    assert trajectory.final_reward == pytest.approx(sum(trajectory.turn_rewards))
    assert not trajectory.success
    only = played([*SOLUTION, *undo], reward="success")
    assert only.turn_rewards == [1.0, -1.0, 1.0, 0.0]
    assert only.success
    shaped = played([*SOLUTION], state_scores="potential")
    assert shaped.turn_rewards == pytest.approx([2.0, -1.0])


def test_success_needs_no_submission_and_many_invalid_commands_end_the_episode() -> None:
    ended = played([*SOLUTION], max_steps_per_episode=1)
    assert (ended.success, ended.final_reward, ended.stop_reason) == (True, 2.0, StopReason.MAX_TURNS)
    invalid = played(["a\0b", "```\na\n```\n```\nb\n```"], error_allowance=1)
    assert invalid.stop_reason is StopReason.INVALID
    assert replies(invalid)[0].startswith("[a command cannot contain NUL characters] Write one command")


def test_programs_are_tested_apart_with_cases_that_the_agent_does_not_see() -> None:
    task = {"family": "write", "level": 1, "part": "train", "seed": 3}
    made = make_task("write", 1, "train", 3)
    [check] = made.checks
    path: str = check.path  # type: ignore[union-attr]
    forged = [
        f"cat > {path} <<'END'\n{body}\nEND"
        for body in (
            "import os\nos.write(1, b'[true]\\n' * 99)\nos._exit(0)",
            "raise SystemExit(0)",
            "while True: pass",
            "import sys\nsys.stdout.write('x' * 10_000_000)",
        )
    ]
    trajectory = played([*forged, *made.solution, "echo '#' >> test_x.py; rm test_*.py"], task, command_timeout_s=3.0)
    assert trajectory.turn_rewards == [0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0]
    assert trajectory.success


def test_replays_are_identical_and_forks_continue_them() -> None:
    env = env_of(max_steps_per_episode=20)
    commands = [
        "ls -la",
        "pwd; echo ~ $HOME $RANDOM",
        "touch new; ls -l new",
        "exit 1",
        "mkdir b; cd b",
        "cat",
        "ls /nowhere",
    ]
    if AUTO == "namespaces":
        commands += ["echo $$; ps -o pid=,comm= | head -n 1", "id; hostname; find .. | sort"]
    first, second = env.rollout([TASK], ScriptedAgent([*commands, "submit"]), num_rollouts=2)
    assert first.messages == second.messages
    assert "agentsgym" not in str(first.messages)
    for turn in (0, 5, len(commands)):
        [fork] = env.fork(first, turn, ScriptedAgent([*commands, "submit"][turn:]))
        assert fork.messages == first.messages
    [solved] = env.fork(first, 4, ReferencePlayer(env))
    assert solved.success
    task = {"family": "fix", "level": 2, "part": "eval", "seed": 5}
    [tested] = env.rollout([task], ScriptedAgent(["python3 -m unittest; ls", "submit"]))
    assert "Ran 6 tests in 0.000s" in replies(tested)[0]
    assert "__pycache__" not in replies(tested)[0]
    [fork] = env.fork(tested, 1, ScriptedAgent(["submit"]))
    assert fork.messages == tested.messages


class Neighbors(Agent):
    """Writes a secret in every session, then looks for those of the others."""

    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
        turn = agent_state or 0
        looks = 'find /home /tmp -name secret-file -readable 2>/dev/null | while read -r name; do cat "$name"; done'
        return ("echo secret-$RANDOM$RANDOM$$ > secret-file; cat secret-file", looks, "submit")[turn], turn + 1


def test_64_episodes_run_at_once_and_do_not_see_each_other() -> None:
    env = env_of()
    together = 0

    class Counting(Neighbors):
        def act(self, requests: Any) -> Any:
            nonlocal together
            together = max(together, len(env.active_states))
            return super().act(requests)

    trajectories = env.rollout(env.tasks(64, families=["text"], level=1), Counting())
    assert not any(one.failed for one in trajectories), [one.error for one in trajectories if one.failed][:1]
    assert together == 64
    for trajectory in trajectories:
        own, found = (reply.splitlines()[0] for reply in replies(trajectory)[:2])
        assert own.startswith("secret-")
        if AUTO != "none":  # otherwise all files have the same owner
            assert found == own
            assert replies(trajectory)[1].count("secret-") == 1


class Raises(Agent):
    """Starts something in the background, and raises in half of the sessions."""

    def __init__(self) -> None:
        self._count = 0

    def get_action(self, messages: Any, agent_state: Any) -> tuple[str, Any]:
        if agent_state is None:
            return "sleep 1000 & (setsid sleep 1000 &)", 1
        self._count += 1
        if self._count % 2:
            raise RuntimeError("no more")
        return "submit", 2


def test_nothing_is_left_after_episodes_that_fail() -> None:
    env = env_of()
    trajectories = env.rollout(env.tasks(50, level=1), Raises())
    assert sum(one.failed for one in trajectories) == 25
    assert not any(one.num_close_errors for one in trajectories)


def test_nothing_is_left_if_a_start_or_a_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    env = env_of()

    async def broken(state: Any) -> Any:
        raise OSError("gone")

    monkeypatch.setattr(env, "_passed", broken)
    [trajectory] = env.rollout([TASK], ScriptedAgent(["submit"]))
    assert trajectory.failed
    assert "gone" in str(trajectory.error)


def test_nothing_is_left_if_a_trial_is_closed_midway_or_takes_too_long() -> None:
    env = env_of()
    [trial] = env.trials([TASK])
    playing = trial.play()
    next(playing)
    assert len(env.active_states) == 1
    playing.close()
    assert not env.active_states
    [late] = env.rollout([TASK], ScriptedAgent(["sleep 1000"]), turn_timeout_s=3.0)
    assert late.failed
    assert "turn_timeout_s" in str(late.error)


def test_an_episode_by_hand_is_closed_by_the_next() -> None:
    env = env_of()
    env.reset(TASK)
    env.step("sleep 1000 &")
    env.reset(TASK)
    _, reward, done, info = env.step("submit")
    assert (reward, done, info["success"]) == (0.0, True, False)


def test_the_isolation_is_checked_before_any_episode_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentsgym.envs.Terminal.shell._problem_of", lambda isolation: "not permitted")
    with pytest.raises(ConfigError, match="does not work on this machine: not permitted"):
        env_of(isolation="namespaces").rollout([TASK], ScriptedAgent(["submit"]))


def test_an_evaluation_reports_progress() -> None:
    env = env_of()
    result = evaluate(env, ReferencePlayer(env), env.tasks(3, level=1))
    assert result.win_rate.mean == 1.0
    assert result.metrics["progress"].mean == 1.0


def test_trials_of_several_episodes_start_anew() -> None:
    env = env_of(episodes_per_trial=2, keep_history=True)
    [trajectory] = env.rollout([TASK], ReferencePlayer(env))
    assert trajectory.final_reward == 4.0
    prompts = [one["content"] for one in trajectory.messages if "Rename" in one["content"]]
    assert len(prompts) == 2
