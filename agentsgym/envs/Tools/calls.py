"""Decide which calls of a turn can be made, make them, and write their results for the agent."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from agentsgym.envs.calls.checks import check_call
from agentsgym.envs.contract import State
from agentsgym.envs.shared.timed import CallTimeoutError, Job
from agentsgym.envs.Tools.process import Process
from agentsgym.envs.Tools.results import ToolResult, as_text, cut, failed, raised
from agentsgym.errors import EnvError
from agentsgym.interruptions import is_interruption
from agentsgym.texts import shown
from agentsgym.types import Action, Message, ToolCall

Hook = Callable[[str, State, ToolCall], ToolResult]


@dataclass(slots=True, kw_only=True)
class Plan:
    """The calls of one turn and their results.

    Attributes:
        calls: The readable calls, in order.
        results: The result of each call; None until it is made.
        complaint: The message about the unreadable calls; empty if there are none.
        num_unreadable: The number of unreadable calls.
        submitted: The answer that was passed to the submit tool; None if it was not called.
        submitted_by: The index of the call that submitted it.
        is_spent: Whether a call exceeded the budget of calls, which ends the episode.
        made: The indices of the calls that were made.
    """

    calls: list[ToolCall]
    results: list[ToolResult | None]
    complaint: str = ""
    num_unreadable: int = 0
    submitted: str | None = None
    submitted_by: int | None = None
    is_spent: bool = False
    made: list[int] = field(default_factory=list[int])

    @property
    def num_failed(self) -> int:
        """The number of readable calls that failed, made or not."""
        return sum(result.failed for result in self.results if result is not None)

    @property
    def is_done(self) -> bool:
        """Whether a call ended the episode, or the budget did."""
        return self.is_spent or any(result.done for result in self.results if result is not None)

    @property
    def success(self) -> bool | None:
        """Whether the task is solved, by the result of the call that ended the episode; False if none did."""
        ends = [result.success for result in self.results if result is not None and result.done]
        return ends[0] if ends else False

    def end_before(self, waiting: Sequence[int]) -> None:
        """Mark the pending calls, the answer included, as not made since an earlier call ended the episode."""
        if self.submitted_by is not None:
            waiting, self.submitted, self.submitted_by = [*waiting, self.submitted_by], None, None
        for index in waiting:
            self.results[index] = failed("not made, since the task had ended")

    def answered(self) -> Iterable[tuple[ToolCall, ToolResult]]:
        """Each call with its result; the submit tool's call is left to the answer."""
        return [pair for pair in zip(self.calls, self.results, strict=True) if pair[1] is not None]  # type: ignore[return-value]

    def messages(self) -> list[Message]:
        """The agent's messages: one per call, of the role ``"tool"``, in call order.

        The message about unreadable calls is appended to the last result: no template and no server accepts a result
        without its call.
        """
        messages: list[Message] = []
        for call, result in self.answered():
            message: Message = {"role": "tool", "name": call.name, "content": result.content}
            if call.id is not None:
                message["tool_call_id"] = call.id
            messages.append(message)
        if messages and self.complaint:
            messages[-1]["content"] = f"{messages[-1]['content']}\n{self.complaint}"
        return messages or [{"role": "user", "content": self.complaint or "Submitted."}]


def plan_of(action: Action, schemas: Sequence[Mapping[str, Any]], config: Mapping[str, Any], *, num_made: int) -> Plan:
    """Decide which calls are made: none that is malformed, does not fit its schema, or exceeds a limit.

    Args:
        action: The agent's turn, with at least one call.
        schemas: The environment's ``tool_schemas``.
        config: The environment's configuration.
        num_made: The number of calls made in the episode so far.
    """
    calls = [call for call in action.tool_calls if call.error is None]
    errors = [call.error for call in action.tool_calls if call.error is not None]
    complaint = cut(_complaint(errors), config["max_result_length"]) if errors else ""
    plan = Plan(calls=calls, results=[None] * len(calls), complaint=complaint, num_unreadable=len(errors))
    most = config["max_calls_per_episode"]
    for index, call in enumerate(calls):
        problem = _problem(plan, index, action, config) or check_call(call, schemas)
        if problem is None and call.name == config["submit_tool"]:
            plan.submitted, plan.submitted_by = as_text(call.arguments["answer"]), index
        elif problem is None and most is not None and num_made + len(plan.made) >= most:
            plan.results[index] = failed(f"not made, since an episode may have {most} calls")
            plan.is_spent = True
        elif problem is None:
            plan.made.append(index)
        else:
            plan.results[index] = failed(problem)
    return plan


def _complaint(errors: Sequence[str]) -> str:
    """Explain why each unreadable call could not be read; equal errors once, for an agent in a loop repeats itself."""
    lines = [
        f"A call could not be read: {error}" if count == 1 else f"{count} calls could not be read: {error}"
        for error, count in Counter(errors).items()
    ]
    return "\n".join(lines)


def _problem(plan: Plan, index: int, action: Action, config: Mapping[str, Any]) -> str | None:
    """The reason why a call is not made, regardless of its arguments; None if it may be made."""
    most = config["max_calls_per_turn"]
    if action.finish_reason == "length":
        return "not made, since the turn was cut off by the limit of its length"
    if plan.submitted is not None:
        return "not made, since the answer was given before"
    if plan.is_spent:
        return "not made, since a call before it was beyond the limit of an episode's calls"
    return f"not made, since a turn may have {most} calls" if most is not None and index >= most else None


class Maker:
    """Makes the calls of a plan.

    Args:
        hook: The environment's ``_call_tool``.
        process: The process in which calls run.
        config: The environment's configuration.
    """

    def __init__(self, hook: Hook, process: Process, config: Mapping[str, Any], *, is_own: bool) -> None:
        """Take ``is_own``: whether the hook is overridden by a subclass, so that no tool defines how it is called."""
        self._hook, self._process, self._is_own = hook, process, is_own
        self._limit_s: float | None = config["tool_timeout_s"]
        self._max_length: int | None = config["max_result_length"]

    def make(self, plan: Plan, session_id: str, state: State) -> None:
        """Make the pending calls, in order; consecutive parallel ones run concurrently.

        Raises:
            EnvError: A tool failed the episode, or the hook did not return a :class:`ToolResult`.
        """
        waiting = [*plan.made]
        plan.made.clear()
        is_over = False
        while waiting and not is_over:
            batch = self._batch(plan, session_id, waiting)
            del waiting[: len(batch)]
            works = [partial(self._hook, session_id, state, plan.calls[index]) for index in batch]
            names = [plan.calls[index].name for index in batch]
            limits_s = [self._limit_of(session_id, name) for name in names]
            if len(batch) == 1:
                results = [self._one(works[0], names[0], limits_s[0])]
            else:
                results = self._many(works, names, limits_s)
            for index, result in zip(batch, results, strict=True):
                plan.results[index] = result
            plan.made += batch
            is_over = any(result.done for result in results)
        if is_over:
            plan.end_before([*waiting])

    def _batch(self, plan: Plan, session_id: str, waiting: Sequence[int]) -> list[int]:
        """The next calls that may run concurrently: at least one."""
        count = 0
        while count < len(waiting) and self._process.is_parallel(session_id, plan.calls[waiting[count]].name):
            count += 1
        return [*waiting[: max(count, 1)]]

    def _limit_of(self, session_id: str, name: str) -> float | None:
        """The time limit that needs a thread; None without a limit, or if the tool enforces it itself."""
        tool = None if self._is_own else self._process.tool_or_none(session_id, name)
        return None if tool is not None and tool.keeps_time else self._limit_s

    def _one(self, work: Callable[[], Any], name: str, limit_s: float | None) -> ToolResult:
        if limit_s is None:
            return self._result(name, limit_s, work)
        runner = self._process.runner
        job = runner.start(work)
        return self._result(name, limit_s, partial(runner.finish, job, limit_s))

    def _many(
        self, works: Sequence[Callable[[], Any]], names: Sequence[str], limits_s: Sequence[float | None]
    ) -> list[ToolResult]:
        runner, start = self._process.runner, time.monotonic()
        jobs = [runner.start(work) for work in works]

        def wait(job: Job, limit_s: float | None) -> Any:
            left_s = None if limit_s is None else max(0.0, start + limit_s - time.monotonic())
            return runner.finish(job, left_s)

        return [
            self._result(name, limit_s, partial(wait, job, limit_s))
            for name, job, limit_s in zip(names, jobs, limits_s, strict=True)
        ]

    def _result(self, name: str, limit_s: float | None, work: Callable[[], Any]) -> ToolResult:
        """Run or await a call, and read its result."""
        try:
            result = work()
        except CallTimeoutError:
            return failed(f"{name} took longer than {limit_s:g} s, and was given up")
        except EnvError:
            raise
        except BaseException as error:  # a tool is foreign code; the agent may retry
            if is_interruption(error):
                raise
            result = raised(error, self._max_length)
        if not isinstance(result, ToolResult):
            raise EnvError(f"_call_tool must return a ToolResult, got {shown(cast('object', result))}")
        content = cut(as_text(result.content), self._max_length)
        return result if content is result.content else replace(result, content=content)
