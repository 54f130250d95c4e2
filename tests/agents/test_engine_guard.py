"""An engine that broke inside a call is not called again: it would go on with what it had under way, for ever."""

from typing import Any

import pytest

from agentsgym.agents.engine import Guarded
from agentsgym.errors import AgentFault


def test_a_broken_engine_is_called_once() -> None:
    calls: list[int] = []

    def generate(number: int) -> int:
        calls.append(number)
        raise RuntimeError("out of memory")

    call = Guarded()
    with pytest.raises(RuntimeError, match="out of memory"):
        call(generate, 1)
    with pytest.raises(AgentFault, match="broke at an earlier call and is not called again: RuntimeError: out of mem"):
        call(generate, 2)
    assert calls == [1]


def test_what_the_engine_refuses_is_no_break() -> None:
    def generate(prompt: str, *, limit: int) -> Any:
        if len(prompt) > limit:
            raise ValueError("the prompt is too long")
        return prompt

    call = Guarded()
    with pytest.raises(ValueError, match="too long"):
        call(generate, "a prompt", limit=3)
    assert call(generate, "ok", limit=3) == "ok"
