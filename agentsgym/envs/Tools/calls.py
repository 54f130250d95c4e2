"""Decide which calls of a turn can be made, make them, and format their results for the agent."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from agentsgym.envs.boundary import as_bool, checked_reward
from agentsgym.envs.shared.timed import CallTimeoutError
from agentsgym.envs.Tools.process import Process
from agentsgym.envs.Tools.results import ToolResult, as_text, cut, failed_result, result_of_exception
from agentsgym.envs.Tools.sources import BusyError
from agentsgym.errors import EnvError
from agentsgym.interruptions import is_interruption
from agentsgym.texts import shown
from agentsgym.tokens.calls.schemas import check_call, with_integers
from agentsgym.types import Action, Message, ToolCall


@dataclass(slots=True, kw_only=True)
class Plan:
    """The calls of one turn and their results.

    Attributes:
        calls: The calls that could be parsed, in order.
        results: The result of each call; None if it has not been made.
        complaint: The message about calls that could not be parsed; empty if there are none.
        num_unreadable: The number of calls that could not be parsed.
        submitted: The answer that was passed to the submit tool; None if it was not called.
        submitted_by: The index of the call of the submit tool; None if it was not called.
        is_spent: Whether a call exceeded the episode's limit of calls, which ends the episode.
        made: The indices of the calls that were made.
        num_raised: The number of calls in which the tool raised an exception.
    """

    calls: list[ToolCall]
    results: list[ToolResult | None]
    complaint: str = ""
    num_unreadable: int = 0
    submitted: str | None = None
    submitted_by: int | None = None
    is_spent: bool = False
    made: list[int] = field(default_factory=list[int])
    num_raised: int = 0

    @property
    def num_failed(self) -> int:
        """The number of parsed calls that failed, whether or not they were made."""
        return sum(result.failed for result in self.results if result is not None)

    @property
    def is_done(self) -> bool:
        """Whether a call or the limit of calls ended the episode."""
        return self.is_spent or any(result.done for result in self.results if result is not None)

    @property
    def success(self) -> bool | None:
        """Whether the task is solved, according to the call that ended the episode; False if no call did."""
        ends = [result.success for result in self.results if result is not None and result.done]
        return ends[0] if ends else False

    def end_before(self, waiting: Sequence[int]) -> None:
        """Mark the pending calls, including a submitted answer, as not made after an earlier call ended the episode."""
        if self.submitted_by is not None:
            waiting, self.submitted, self.submitted_by = [*waiting, self.submitted_by], None, None
        for index in waiting:
            self.results[index] = failed_result("not made, since the task had ended")

    def calls_with_results(self) -> Iterable[tuple[ToolCall, ToolResult]]:
        """Return each call with its result, except the call of the submit tool, which has none."""
        return [pair for pair in zip(self.calls, self.results, strict=True) if pair[1] is not None]  # type: ignore[return-value]

    def messages(self) -> list[Message]:
        """Return the messages for the agent: one of the role ``"tool"`` per call, in call order.

        The message about calls that could not be parsed is appended to the last result, since templates and servers
        reject a result without a call.
        """
        messages: list[Message] = []
        for call, result in self.calls_with_results():
            message: Message = {"role": "tool", "name": call.name, "content": result.content}
            if call.id is not None:
                message["tool_call_id"] = call.id
            messages.append(message)
        if messages and self.complaint:
            messages[-1]["content"] = f"{messages[-1]['content']}\n{self.complaint}"
        return messages or [{"role": "user", "content": self.complaint or "Submitted."}]


def plan_calls(
    action: Action, schemas: Sequence[Mapping[str, Any]], config: Mapping[str, Any], *, num_made: int
) -> Plan:
    """Decide which calls to make: those that are well-formed, match their schemas, and are within the limits.

    Args:
        action: The agent's turn, with at least one call.
        schemas: The environment's ``tool_schemas``.
        config: The environment's configuration.
        num_made: The number of calls made in the episode so far.
    """
    calls = [call for call in action.tool_calls if call.error is None]
    errors = [call.error for call in action.tool_calls if call.error is not None]
    lines = [  # equal errors are reported once, since agents often repeat a call
        f"A call could not be read: {error}" if count == 1 else f"{count} calls could not be read: {error}"
        for error, count in Counter(errors).items()
    ]
    complaint = cut("\n".join(lines), config["max_result_length"])
    plan = Plan(calls=calls, results=[None] * len(calls), complaint=complaint, num_unreadable=len(errors))
    most = config["max_calls_per_episode"]
    for index, call in enumerate(calls):
        problem = _problem(plan, index, action, config) or check_call(call, schemas)
        if problem is None and call.name == config["submit_tool"]:
            plan.submitted, plan.submitted_by = as_text(call.arguments["answer"]), index
        elif problem is None and most is not None and num_made + len(plan.made) >= most:
            plan.results[index] = failed_result(f"not made, since an episode may have {most} calls")
            plan.is_spent = True
        elif problem is None:
            plan.made.append(index)
            plan.calls[index] = with_integers(call, schemas)
        else:
            plan.results[index] = failed_result(problem)
    return plan


def _problem(plan: Plan, index: int, action: Action, config: Mapping[str, Any]) -> str | None:
    """Return the reason, apart from its arguments, why a call is not made; None if there is none."""
    most = config["max_calls_per_turn"]
    if action.finish_reason == "length":
        return "not made, since the turn was cut off by the limit of its length"
    if plan.submitted is not None:
        return "not made, since the answer was given before"
    if plan.is_spent:
        return "not made, since a call before it was beyond the limit of an episode's calls"
    return f"not made, since a turn may have {most} calls" if most is not None and index >= most else None


def make_calls(
    plan: Plan,
    hook: Callable[[ToolCall], ToolResult],
    process: Process,
    session_id: str,
    config: Mapping[str, Any],
    *,
    is_own: bool,
) -> None:
    """Make a plan's calls, in order; consecutive calls of parallel tools run concurrently.

    Args:
        plan: The calls.
        hook: The environment's ``_call_tool`` with the session and state already bound.
        process: The resources of this process.
        session_id: The session.
        config: The environment's configuration.
        is_own: Whether a subclass overrides the hook, in which case no tool enforces its time limit itself.

    Raises:
        EnvError: A tool raised it to fail the episode, or the hook did not return a :class:`ToolResult`.
    """
    waiting, plan.made = plan.made, []
    is_over = False
    while waiting and not is_over:
        count = 0
        while count < len(waiting) and process.is_parallel(session_id, plan.calls[waiting[count]].name):
            count += 1
        batch, waiting = waiting[: max(count, 1)], waiting[max(count, 1) :]
        limits_s: list[float | None] = []  # None if the tool enforces the limit itself, without a thread
        for index in batch:
            tool = None if is_own else process.tool_or_none(session_id, plan.calls[index].name)
            limits_s.append(None if tool is not None and tool.keeps_time else config["tool_timeout_s"])
        works = [partial(hook, plan.calls[index]) for index in batch]
        start = time.monotonic()
        in_thread = len(batch) > 1 or limits_s[0] is not None
        jobs = [process.runner.start(work) for work in works] if in_thread else []
        for place, index in enumerate(batch):
            work = works[place]
            if jobs:
                limit_s = limits_s[place]
                left_s = None if limit_s is None else max(0.0, start + limit_s - time.monotonic())
                work = partial(process.runner.finish, jobs[place], left_s)
            plan.results[index] = result = _result_of(work, plan.calls[index].name, config, plan, process)
            is_over = is_over or result.done
        plan.made += batch
    if is_over:
        plan.end_before(waiting)


def _result_of(
    work: Callable[[], Any], name: str, config: Mapping[str, Any], plan: Plan, process: Process
) -> ToolResult:
    """Run or await a call, and return its checked result; an exception of the tool becomes a failed result."""
    max_length = config["max_result_length"]
    try:
        result = work()
    except CallTimeoutError:
        return failed_result(f"{name} took longer than {config['tool_timeout_s']:g} s, and was given up")
    except EnvError:
        raise
    except BaseException as error:  # tools are user code, and the agent may retry
        if is_interruption(error):
            raise
        if not isinstance(error, BusyError):
            plan.num_raised += 1
            process.report(name, error)
        result = result_of_exception(error, max_length)
    if not isinstance(result, ToolResult):
        raise EnvError(f"_call_tool must return a ToolResult, got {shown(cast('object', result))}")
    tool, success = f"the tool {name}", result.success
    return replace(
        result,
        content=cut(as_text(result.content), max_length),
        reward=checked_reward(tool, result.reward),
        done=as_bool("done", result.done, tool),
        failed=as_bool("failed", result.failed, tool),
        success=None if success is None else as_bool("success", success, tool),
    )
