"""A small game that is won by calling two tools and answering what they gave."""

from typing import Any

from agentsgym import Action, Message, MultistepEnv

Stepped = tuple[dict[str, Any], float, bool, dict[str, Any]]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


class SumEnv(MultistepEnv):
    """Requests a sum; results go out as messages of the role that the class states."""

    def _tools(self) -> Any:
        return [add]

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "say": [{"role": "user", "content": "What is 2 + 3?"}], "seen": []}

    def _format_prompt(self, state: dict[str, Any], step: int) -> list[Message]:
        return state["say"]

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Stepped:
        return state, float(action.strip() == "5"), True, {"success": action.strip() == "5", "seen": state["seen"]}

    def _step_action(self, session_id: str, state: dict[str, Any], action: Action) -> Stepped:
        state["seen"].append(action)
        if not action.tool_calls:
            return self._step_episode(session_id, state, action.text)
        state["say"] = []
        for call in action.tool_calls:
            output = call.error or str(add(**call.arguments))
            ids: Any = {} if call.id is None else {"tool_call_id": call.id}
            state["say"].append({"role": "tool", "content": output, "name": call.name, **ids})
        return state, 0.0, False, {"seen": state["seen"]}
