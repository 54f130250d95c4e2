"""Grading: what is equal is right, what is not is wrong, and what hangs is cut off."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentsgym import ScriptedAgent
from agentsgym.envs.ReasoningEvals import ReasoningEvalsEnv, grading
from agentsgym.envs.ReasoningEvals.grading import GRADES, Grader, Verdict, shared

LIMIT_S = 20.0  # an answer takes milliseconds; a busy machine is to fail no test


@pytest.mark.parametrize(
    ("answer", "gold", "is_right"),
    [
        ("0.5", "1/2", True),
        ("1+x^2", "x^2+1", True),
        (r"2\sqrt2", r"\sqrt{8}", True),
        ("0.5", r"50\%", True),
        ("x=5", "5", True),
        ("1024", "2^{10}", True),
        (r"\{2, 1\}", r"\{1, 2\}", True),
        ("PARIS", "Paris", True),
        ("parsi", "Paris", False),  # the letters' product is the same
        ("3 rac erds", "3 red cars", False),
        ("(b)", "B", True),
        ("C", "B", False),
        ("19", "18", False),
        ("17 or 18", "18", False),
        ("0, 1, 2, 18", "18", False),
        ("$18$ $19$", "18", False),
        ("10 8", "18", False),
        ("17=18", "18", False),
        ("1=2=3=18", "18", False),
        ("x=17=18", "18", False),
        (r"17 \equiv 18", "18", False),
        (r"17=\frac{x}{2}", r"\frac{x}{2}", False),
        ("17=x=18", "x=18", False),
        ("18=18=18=18=18=18", "18", False),
        ("2+16=18", "18", True),
        ("x_1=18", "18", True),
        ("f(x)=x^2", "x^2", True),
        ("y^2+x^2=1", "x^2+y^2=1", True),
        ("18%", "18", True),
        ("18 percent", "0.18", True),
        ("18 dollars", "18", True),
        ("18 eggs", "$18", True),
        ("18 miles per hour", "18", True),
        (r"18\text{ dollars}", "18", True),
        ("1 000 km", "1000", True),
        ("- 5 degrees", "-5", True),
        ("19 dollars", "18", False),
        ("18 and a half", "18", False),
        ("18 eggs or 19", "18", False),
        ("18 x", "18", False),
        ("18 thousand", "18", False),
        ("18 thousand dollars", "18,000", True),
        ("18 squared", "18", False),
        ("2000000", "2 million", True),
        ("2,000,000 people", "2 million", True),
        ("2 million", "2000000", True),
        ("2 million people", "2000000", True),
        ("2 million, say", "2000000", True),
        ("$2 million", "2000000", True),
        ("$2,000,000", r"2\text{ million}", True),
        ("2.5 million", "2500000", True),
        ("2,500 thousand", "2.5 million", True),
        ("1,5 million", "1500000", True),
        ("1,5 million euros", "1.5 million", True),
        ("2", "2 million", False),
        ("2 million", "2", False),
        ("2 million dollars", "2000000", True),
        ("2000000", "2 million dollars", True),
        ("$2 million", "2,000,000 dollars", True),
        ("2 million dollars", "2", False),
        ("2", "2 million dollars", False),
        ("2000000", "2 million or 3 million dollars", False),
        ("2 billion", "2 million", False),
        ("2.5 million", "2 million", False),
        ("15 million", "1,5 million", False),
        ("1,5", "1.5 million", False),
        ("1,5", "1.5", False),
        ("2 million or 3 million", "2 million", False),
        ("2 million 500 thousand", "2 million", False),
        (r"18\%", "0.18", True),
        (" ".join(map(str, range(1000))), "18", False),
        (r"\frac{", "1/2", False),
        ("{" * 900, "x^2", False),
        ("{" * 400 + "x^2" + "}" * 400, "x^2", False),
    ],
)
def test_auto_accepts_what_is_equal_and_nothing_else(answer: str, gold: str, is_right: bool) -> None:
    assert GRADES["auto"](answer, gold, LIMIT_S).score == is_right


@pytest.mark.parametrize(
    ("answer", "is_right"), [("2 million dollars", True), ("2,000,000", True), ("2 dollars", False), ("dollars", False)]
)
def test_a_number_may_have_a_unit(answer: str, is_right: bool) -> None:
    assert GRADES["number"](answer, "2000000", LIMIT_S).score == is_right


@pytest.mark.parametrize("answer", ["2 million", "So it is 2 million.", "It has $2,000,000", "#### 2000000"])
@pytest.mark.parametrize("gold", ["2 million", "2000000", "2,000 thousand"])
def test_a_scaled_answer_is_right_however_it_is_written(answer: str, gold: str) -> None:
    env = ReasoningEvalsEnv()
    for output, is_right in [(answer, True), ("So it is 2.", False), (answer.replace("2", "3"), False)]:
        [rollout] = env.rollout([{"question": "How many?", "answer": gold}], ScriptedAgent([output]))
        assert rollout.info["success"] is is_right


def test_what_is_cheap_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "shared", None)
    for answer, gold in (
        ("18", "18.0"),
        ("17", "18"),
        ("17 eggs", "18"),
        ("Paris", "Rome"),
        ("a", "B"),
        ("x^2", " x^2"),
    ):
        GRADES["auto"](answer, gold, LIMIT_S)
    with pytest.raises(AttributeError):
        GRADES["auto"]("x", "x^2", LIMIT_S)


@pytest.mark.parametrize("answer", ["9^{9^9}", "(10^9)!", "9^{9^{9^9}}"])
def test_a_computation_that_hangs_is_cut_off_and_the_next_is_graded(answer: str) -> None:
    assert GRADES["math"](answer, "x^2", 0.5) == Verdict(0.0, "timeout")
    assert GRADES["math"]("y+x", "x+y", LIMIT_S) == Verdict(1.0)


def test_it_grades_in_threads() -> None:
    with ThreadPoolExecutor(4) as threads:
        verdicts = threads.map(lambda n: GRADES["math"](f"{n}+x", f"x+{n}", LIMIT_S).score, range(20))
        assert [*verdicts] == [1.0] * 20


def test_a_process_that_is_killed_is_replaced() -> None:
    grader = Grader()
    request = {"kind": "math", "answer": "1+x", "gold": "x+1"}
    assert grader.grade(request, LIMIT_S) == {"score": 1.0}
    assert grader._process is not None
    os.kill(grader._process.pid, signal.SIGKILL)
    assert grader.grade(request, LIMIT_S) == {"score": 1.0}
    grader.close()
    assert grader._process is None


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="there is no such signal")
def test_a_process_that_does_not_answer_at_all_is_killed_for_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "_GRACE_S", 0.2)
    grader = Grader()
    request = {"kind": "math", "answer": "1+x", "gold": "x+1"}
    grader.grade(request, LIMIT_S)
    assert grader._process is not None
    os.kill(grader._process.pid, signal.SIGSTOP)
    assert grader.grade(request, 0.2) == {"score": 0.0, "note": "timeout"}
    assert grader._process is None  # the next request starts another


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="processes cannot be waited for by number")
def test_the_process_ends_with_the_one_that_started_it_even_where_that_is_killed() -> None:
    program = (
        "import time\n"
        "from agentsgym.envs.ReasoningEvals.grading import shared\n"
        "shared.grade({'kind': 'math', 'answer': '1+x', 'gold': 'x+1'}, 60)\n"
        "print(shared._process.pid, flush=True)\n"
        "shared.grade({'kind': 'math', 'answer': '9^{9^9}', 'gold': 'x+1'}, 1)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        grader = os.pidfd_open(int(owner.stdout.readline()))
        os.kill(owner.pid, signal.SIGKILL)
    ended, _, _ = select.select([grader], [], [], 90)
    os.close(grader)
    assert ended


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_starts_a_grader_of_its_own_and_leaves_this_one_alone() -> None:
    shared.grade({"kind": "math", "answer": "x", "gold": "x+1"}, LIMIT_S)
    own = shared._process
    program = (
        "import os, sys\n"
        "from agentsgym.envs.ReasoningEvals.grading import shared\n"
        "request = {'kind': 'math', 'answer': '1+x', 'gold': 'x+1'}\n"
        "shared.grade(request, 60)\n"
        "first = shared._process.pid\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    good = shared.grade(request, 60) == {'score': 1.0} and shared._process.pid != first\n"
        "    shared.close()\n"
        "    os._exit(0 if good else 1)\n"
        "_, status = os.waitpid(child, 0)\n"
        "assert status == 0 and shared.grade(request, 60) == {'score': 1.0} and shared._process.pid == first\n"
        "print(first)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(ran.stdout), 0)  # it was closed with the process that started it
    assert shared._process is own


def test_grading_waits_for_no_other_threads_end() -> None:
    assert threading.active_count() < 50
    for _ in range(20):
        GRADES["math"]("1+x", "x+1", LIMIT_S)
    assert threading.active_count() < 50
