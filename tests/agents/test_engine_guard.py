"""An engine that broke inside a call is not called again: it would work on what it still holds, forever."""

from typing import Any

import pytest

from agentsgym.agents.direct import FailFastEngine
from agentsgym.errors import AgentError


class LLM:
    """What a ``vllm.LLM`` is queried for after an error: whether it still holds requests."""

    def __init__(self, *, is_busy: bool) -> None:
        self.llm_engine = self
        self.is_busy = is_busy
        self.calls: list[int] = []

    def has_unfinished_requests(self) -> bool:
        return self.is_busy

    def generate(self, number: int) -> int:
        self.calls.append(number)
        if number == 1:
            raise RuntimeError("out of memory")
        return number


def test_an_engine_that_broke_at_its_work_is_not_called_again() -> None:
    llm = LLM(is_busy=True)
    call = FailFastEngine(llm)
    with pytest.raises(RuntimeError, match="out of memory"):
        call(llm.generate, 1)
    with pytest.raises(AgentError, match="failed in an earlier call and is not called again: RuntimeError: out of mem"):
        call(llm.generate, 2)
    assert llm.calls == [1]


@pytest.mark.parametrize("engine", [LLM(is_busy=False), object(), None])
def test_an_engine_that_refused_a_request_is_called_again(engine: Any) -> None:
    llm = LLM(is_busy=False)
    call = FailFastEngine(engine)
    with pytest.raises(RuntimeError, match="out of memory"):
        call(llm.generate, 1)
    assert call(llm.generate, 2) == 2
