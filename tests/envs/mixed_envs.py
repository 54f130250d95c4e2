"""Four small environments for the tests of mixed runs: two of words, one of numbers, one with a tool."""

from __future__ import annotations

from typing import Any, ClassVar

from agentsgym import MultistepEnv, register
from agentsgym.fields import Field, is_int

Step = tuple[dict[str, Any], float, bool, dict[str, Any]]


class SayTheColor(MultistepEnv):
    """One turn: answer the requested color."""

    task_fields: ClassVar = ("color",)

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "color": task_data["color"]}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return f"Say {state['color']}"

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        won = action == state["color"]
        return state, float(won), True, {"success": won}

    @classmethod
    def get_train_dataset(cls, env_config: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        colors = ["red", "blue"][: kwargs.get("size", 2)]
        path = f"{cls.__module__}.{cls.__name__}"
        return [{"env_class_path": path, "env_config": env_config, "task_data": {"color": one}} for one in colors]

    get_eval_dataset = get_train_dataset


class SayItTwice(SayTheColor):
    """Two turns, each of which gives."""

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        won = action == state["color"]
        turn = state.get("turn", 0) + 1
        return {**state, "turn": turn}, float(won), turn >= 2, {"success": won}


class Guess(MultistepEnv):
    """Guess a number; the highest is a setting."""

    config_fields: ClassVar = {"highest": Field(default=3, expected="an int of at least 1", valid=is_int(1))}
    default_config: ClassVar = {"max_steps_per_episode": 3, "error_allowance": 3}

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "secret": self.rng(session_id).randint(1, self.env_config["highest"])}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return "No." if step else f"Which number? 1 to {self.env_config['highest']}"

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        won = action == str(state["secret"])
        return state, float(won), won, {"success": won, "invalid": not action.isdigit()}


class LookUp(MultistepEnv):
    """Look up a word with the tool, then state what it means."""

    default_config: ClassVar = {"max_steps_per_episode": 2, "error_allowance": 2}
    TABLE: ClassVar = {"one": "un", "two": "deux"}

    def _tools(self) -> Any:
        def look_up(word: str) -> str:
            """Look up a word.

            Args:
                word: The word.
            """
            return self.TABLE[word]

        return [look_up]

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "word": task_data["word"], "text": f"What is {task_data['word']}"}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return state["text"]

    def _step_action(self, session_id: str, state: dict[str, Any], action: Any) -> Step:
        calls = [call for call in action.tool_calls if not call.error]
        if calls:
            return {**state, "text": str(self.TABLE.get(calls[0].arguments.get("word"), "unknown"))}, 0.0, False, {}
        return self._step_episode(session_id, state, action.text)

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Step:
        won = action == self.TABLE[state["word"]]
        return state, float(won), True, {"success": won}


for env_class in (SayTheColor, SayItTwice, Guess, LookUp):
    register(env_class)
