"""Show an episode as it is played, and its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentsgym.agents.base import Agent, as_agent
from agentsgym.agents.human import new_messages
from agentsgym.cli.console import out, plain, print_text
from agentsgym.errors import AgentError
from agentsgym.types import Action, ToolCall, TurnRequest

if TYPE_CHECKING:
    from agentsgym.types import Trajectory

_HEADINGS = {
    "system": ("system message", "cyan"),
    "tool": ("result", "magenta"),
    "tools": ("tools: call them as name(argument=value) or as JSON", "magenta"),
    "note": ("", "yellow"),
    "assistant": ("answer", "green"),
}


def show_message(role: str, text: str) -> None:
    """Print a message under a heading for its role; ``"tools"`` and ``"note"`` also have headings."""
    heading, color = _HEADINGS.get(role, ("", ""))
    if heading:
        out().print(f"[{heading}]", style=f"bold {color}")
    print_text(text, "" if role in ("user", "assistant") else color)


class WatchedAgent(Agent):
    """An agent that wraps another and prints its observations and replies."""

    def __init__(self, inner: Any) -> None:
        self._inner = as_agent(inner)

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Show the new messages, call the wrapped agent, and show its replies."""
        for request in requests:
            num_shown, _ = request.agent_state or (0, None)
            for message in new_messages(replace(request, agent_state=num_shown)):
                show_message(message["role"], message["content"])
        inner = [replace(one, agent_state=one.agent_state[1] if one.agent_state else None) for one in requests]
        answers: list[Action | AgentError] = []
        for request, answer in zip(requests, self._inner.act(inner), strict=True):
            if isinstance(answer, AgentError):
                answers.append(answer)
                continue
            text = [answer.text] if answer.text.strip() or not answer.tool_calls else []
            show_message("assistant", "\n".join([*text, *map(call_text, answer.tool_calls)]))
            answers.append(replace(answer, agent_state=(len(request.messages) + 1, answer.agent_state)))
        return answers

    def finish(self) -> None:
        """Finish the wrapped agent."""
        self._inner.finish()


def call_text(call: ToolCall) -> str:
    """Format a call as a person would type it.

    >>> call_text(ToolCall(name="price", arguments={"good": "eggs"}))
    "price(good='eggs')"
    """
    if call.error is not None:
        return f"{call.name}: invalid call ({call.error})"
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def show_summary(trajectory: Trajectory) -> None:
    """Print the outcome of an episode and the reward of each turn; if it was lost, also the task, with its solution."""
    outcome, color = {True: ("won", "green"), False: ("lost", "yellow"), None: ("ended", "cyan")}[trajectory.success]
    if trajectory.failed:
        outcome, color = "failed", "red"
    turns = trajectory.num_turns
    ended = f"{outcome} after {turns} turn{'' if turns == 1 else 's'} ({trajectory.stop_reason.value})"
    out().print(f"\n{ended}: reward {trajectory.final_reward:zg}", style=f"bold {color}")
    if turns > 1:
        out().print("rewards by turn: " + " ".join(f"{reward:zg}" for reward in trajectory.turn_rewards[:50]))
    if any(turn.invalid for turn in trajectory.turns):
        out().print(f"invalid actions: {sum(turn.invalid for turn in trajectory.turns)}")
    for role, reward in trajectory.final_rewards.items():
        out().print(plain(f"role {role}: {reward:zg}", 200))
    for name, amount in (trajectory.final_components or {}).items():
        out().print(plain(f"reward {name}: {amount:zg}", 200))
    task = [f"{key}={value!r}" for key, value in trajectory.task_data.items() if key != "seed"]
    if trajectory.success is False and task:
        out().print(plain(f"the task was {', '.join(task)}", 400))
    if trajectory.error is not None:
        print_text(trajectory.error.strip(), "red")
