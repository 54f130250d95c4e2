"""Grade an extracted answer by text, by number, or by computer algebra in a process that is replaced when it hangs."""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentsgym.envs.ReasoningEvals import generated
from agentsgym.envs.ReasoningEvals.extraction import Kind, brace_depth
from agentsgym.envs.shared.child_process import ChildExitedError, ChildProcess
from agentsgym.envs.shared.numbers import as_number, canonical, quantities
from agentsgym.errors import EnvError
from agentsgym.texts import shown

_START_LIMIT_S = 120.0  # imports on a busy machine
_GRACE_S = 3.0  # in addition to a request's limit, which the process normally enforces itself
_GENERATION_LIMIT_S = 30.0  # to create a generator before an answer is graded
_MODULE = "agentsgym.envs.ReasoningEvals.grader_main"
_PACKAGE = {"math": "math_verify", "generated": "reasoning_gym"}


class Grader:
    """A client of the grading process, which handles one request at a time; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None
        self._loaded: set[str] = set()

    def grade(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Grade an answer.

        Args:
            request: The request, with ``kind`` ``"math"`` (``gold``, ``answer``) or ``"generated"`` (``task``,
                ``difficulty``, ``entry``, ``answer``).
            limit_s: The time limit in seconds.

        Returns:
            ``{"score": float}``, in [0, 1]. If the answer could not be graded and is therefore wrong, ``note`` is
            ``"timeout"`` or the exception.
        """
        package = _PACKAGE[request["kind"]]
        extra_s = _GENERATION_LIMIT_S if request["kind"] == "generated" else 0.0
        with self._lock:
            for is_last in (False, True):
                try:
                    if self._process is None:
                        self._process, self._loaded = ChildProcess(_MODULE, "the grader's process"), set()
                    if package not in self._loaded:
                        reply = self._process.call({"kind": "load", "package": package}, _START_LIMIT_S)
                        if reply.get("note"):
                            raise EnvError(f"the grader cannot load {package}: {reply['note']}")
                        self._loaded.add(package)
                    return self._process.call({**request, "limit_s": limit_s}, limit_s + _GRACE_S + extra_s)
                except ChildExitedError as ended:
                    self._end()
                    watchdog_fired = ended.returncode == 1 and package in self._loaded  # the watchdog exits with 1
                    if ended.timed_out or watchdog_fired:
                        return {"score": 0.0, "note": "timeout"}
                    if is_last:
                        raise EnvError(f"the grading process crashed twice on {shown(request)}") from ended
            raise AssertionError  # the loop returns or raises

    def close(self) -> None:
        """End the process, if it is running; the next request starts a new one."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """Forget the process without ending it, since after a fork it belongs to the parent."""
        self._lock, self._process = threading.Lock(), None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()


shared = Grader()
atexit.register(shared.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=shared.forget)


_MAX_LENGTH = 1000  # of an answer passed to computer algebra
_MAX_DEPTH = 20  # of nested braces: parsing time grows steeply with it
_LETTER = re.compile(r"\(?([A-Z])\)?")
_OPERATORS = re.compile(r"[\d\\^=+*/<>|√π∞\u222a\u2229]")
_IN_LATEX = re.compile(r"\\text\{[^{}]*\}|\\[a-zA-Z]+|\b(?:sqrt|sin|cos|tan|log|exp|ln|pi|inf)\b")
_WORD = re.compile(r"[^\W\d_]{3,}")
_SPACED_DIGITS = re.compile(r"\d\s+\d")  # "10 8" would be parsed as the mixed number 18
_EQUALS = re.compile(r"(?<![<>!:])=|\\equiv(?![a-zA-Z])")
_VALUE = re.compile(r"(?<![_\w{])\d|[\d)}]\s*[-+*/^]|\\(?:d|t)?frac|\\sqrt|\\pi|π|√")  # not a mere name, as in "x_1 ="
_MAX_SIDES = 4  # of an equation; each may take the full time limit


@dataclass(frozen=True, slots=True)
class Verdict:
    """The grade of an answer.

    Attributes:
        score: The score in [0, 1]; 1.0 is right.
        note: The reason why the answer could not be graded and is therefore wrong, ``"timeout"`` or the exception;
            None if it was graded.
    """

    score: float
    note: str | None = None


Grade = Callable[[str, str, float], Verdict]  # (answer, gold, limit_s)


def kind_of(gold: str | None, *, has_choices: bool) -> Kind:
    """Determine the kind of the right answer."""
    if has_choices or (gold is not None and _LETTER.fullmatch(gold.strip())):
        return "choice"
    return "number" if gold is not None and as_number(gold) is not None else "text"


def by_text(answer: str, gold: str, limit_s: float) -> Verdict:  # noqa: ARG001  # all graders share one signature
    """Compare as texts, ignoring case, spacing and number formatting."""
    return Verdict(float(canonical(answer) == canonical(gold)))


def by_letter(answer: str, gold: str, limit_s: float) -> Verdict:  # noqa: ARG001
    """Compare letters of choices, with or without parentheses."""
    return Verdict(float(_letter(answer) == _letter(gold)))


def by_number(answer: str, gold: str, limit_s: float) -> Verdict:  # noqa: ARG001
    """Compare as numbers; the answer may have a unit, and an answer that is not a number is wrong."""
    right = as_number(gold)
    return Verdict(float(right is not None and any(one.equals(right) for one in quantities(answer))))


def by_math(answer: str, gold: str, limit_s: float) -> Verdict:
    """Compare as expressions with ``math-verify``; every side of an equation that is a value must be right."""
    answer, gold = _without_dollars(answer), _without_dollars(gold)
    depth = brace_depth(answer)
    if len(answer) > _MAX_LENGTH or _SPACED_DIGITS.search(answer) or depth is None or depth > _MAX_DEPTH:
        return Verdict(0.0)
    *before, _ = sides = _EQUALS.split(answer)
    if len(sides) > len(_EQUALS.split(gold)):  # math-verify would compare only the last side
        if len(sides) > _MAX_SIDES:
            return Verdict(0.0)
        for side in filter(_VALUE.search, before):
            verdict = by_auto(side, gold, limit_s)
            if verdict.score < 1.0:
                return verdict
    return Verdict(**shared.grade({"kind": "math", "answer": answer, "gold": gold}, limit_s))


def by_auto(answer: str, gold: str, limit_s: float) -> Verdict:
    """Grade with the cheapest grader that applies."""
    if canonical(answer) == canonical(gold):
        return Verdict(1.0)
    if _LETTER.fullmatch(gold.strip()):
        return by_letter(answer, gold, limit_s)
    if (right := as_number(gold)) is not None and (meant := quantities(answer)):
        return Verdict(float(any(one.equals(right) for one in meant)))
    if is_mathematical(gold):
        return by_math(answer, gold, limit_s)
    own = as_number(answer)  # the right answer may have a unit that the agent's answer lacks
    return Verdict(float(own is not None and any(one.equals(own) for one in quantities(gold))))


def is_mathematical(gold: str) -> bool:
    r"""Whether an answer is an expression rather than words, which computer algebra parses as products of letters.

    >>> is_mathematical(r"2\sqrt{3}"), is_mathematical("Paris"), is_mathematical("3 red cars")
    (True, False, False)
    """
    return bool(_OPERATORS.search(gold)) and not _WORD.search(_IN_LATEX.sub(" ", gold))


def by_generator(task_data: Mapping[str, Any], answers: Sequence[str], limit_s: float) -> Verdict:
    """Grade the answer to a ``reasoning-gym`` problem with the problem's generator.

    If the answer can be read in several ways, the best score counts. Grading each of them takes at most ``limit_s`` s.
    """
    task, difficulty, item = (task_data[name] for name in ("task", "difficulty", "item"))
    problem = generated.make_item(task, difficulty, item)
    if problem.solution in answers:
        return Verdict(1.0)
    of_problem = {"task": task, "difficulty": difficulty, "entry": generated.pack(problem)}
    requests = [{"kind": "generated", **of_problem, "answer": one} for one in answers]
    verdicts = [Verdict(**shared.grade(request, limit_s)) for request in requests]
    return max(verdicts, key=lambda verdict: verdict.score)


#: The graders, by name.
GRADES: Mapping[str, Grade] = {
    "auto": by_auto,
    "text": by_text,
    "number": by_number,
    "choice": by_letter,
    "math": by_math,
}


def _letter(text: str) -> str:
    found = _LETTER.fullmatch(text.strip().upper())
    return found[1] if found else text.strip()


def _without_dollars(text: str) -> str:
    return text.replace(r"\$", "").replace("$", " ").strip()
