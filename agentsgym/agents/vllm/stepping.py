"""Step a vLLM engine in a thread of this process while requests come and go: no answer waits for another.

::

    agents' loop   sample ─┐ sample ─┐                 ┌─▶ answer to the first
    engine thread    step  add  step add  step … step ─┘  step …      no open request: it waits

Only methods of the engine are called; vLLM itself is not imported.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

import torch

from agentsgym.agents.policy.context_length import budget_within
from agentsgym.agents.vllm.sampling import Sampled, VLLMSampling, engine_params
from agentsgym.errors import AgentError, AgentsGymError
from agentsgym.texts import sentence_of

STEP_LIMIT_S: Final = 60.0  # for the step that is running when a rollout ends; a longer one counts as hanging


@dataclass(frozen=True, slots=True)
class _OpenRequest:
    """A request in the engine, and the future for its answer."""

    name: str
    prompt: list[int]
    max_tokens: int
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]


class SteppedEngine:
    """Answers individual requests from a ``vllm.LLM``, which a thread steps while any request is open.

    The thread runs from the first request to :meth:`finish`, and only it uses the engine meanwhile. An engine that
    fails is not called again: because of its unfinished requests, the next call would never return.

    Attributes:
        step: Optimizer step of the engine's weights, recorded in each answer.
    """

    def __init__(self, sampling: VLLMSampling) -> None:
        self.step: int | None = None
        self._engine: Any = sampling.generation.llm.llm_engine
        self._params = engine_params(sampling)
        self._context: int = self._engine.model_config.max_model_len
        self._device: torch.device = sampling.generation.accelerator.device
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open: dict[str, _OpenRequest] = {}  # used only on the thread
        self._names = (f"agentsgym-{number}" for number in itertools.count())
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._failure = ""

    async def sample(self, session_id: str, prompt: list[int], room: int) -> Sampled:
        """Sample an answer of at most ``room`` tokens; cancellation aborts the request."""
        if self._failure:
            raise AgentError(f"the vLLM engine failed in an earlier call and is not called again: {self._failure}")
        limit_name = "the maximum context length of the vLLM engine"
        room = max(1, budget_within(self._context, prompt, room, limit_name, "raise vllm_max_model_length, or "))
        loop, step = asyncio.get_running_loop(), self.step
        one = _OpenRequest(next(self._names), prompt, room, loop, loop.create_future())
        if self._thread is None:
            self._is_ending = False
            # Work queued on this thread's stream (loading weights) must run before the engine's work.
            stream = None if self._device.type == "cpu" else torch.accelerator.current_stream(self._device)
            self._thread = threading.Thread(target=self._run, args=(stream,), name="agentsgym-vllm", daemon=True)
            self._thread.start()
        self._inbox.put(lambda: self._add(one))
        try:
            ids, logprobs = await one.answer
        except asyncio.CancelledError:
            self._inbox.put(lambda: self._drop(one))
            raise
        return Sampled(token_ids=ids, logprobs=logprobs, step=step)

    def finish(self) -> None:
        """Abort open requests, and stop the thread; if a step hangs, the thread and the engine are abandoned."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._inbox.put(self._end)
        thread.join(STEP_LIMIT_S)
        if thread.is_alive():
            self._failure = f"one of its steps did not end within {STEP_LIMIT_S:g} s"

    def check(self) -> None:
        """Raise :class:`AgentsGymError` if the engine failed, so that no more weights are loaded into it."""
        if self._failure:
            raise AgentsGymError(
                f"the vLLM engine failed and is not called again: {self._failure}; restart the run from its last "
                "checkpoint"
            )

    # On the thread

    def _run(self, stream: Any) -> None:
        if stream is not None:
            torch.accelerator.set_stream(stream)  # this also selects the device, which differs between threads
        try:
            while not self._is_ending:
                if not self._open:
                    self._inbox.get()()
                while not self._inbox.empty():
                    self._inbox.get()()
                if self._open:
                    self._answer(self._engine.step())
        except BaseException as error:  # noqa: BLE001  # an error of the engine fails all open requests
            self._failure = f"{type(error).__name__}: {sentence_of(error)}"
            for one in [*self._open.values()]:
                self._settle(one, AgentError(f"the vLLM engine failed: {self._failure}"))
            self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Answer incoming requests with the engine's error until the rollout ends."""
        while not self._is_ending:
            self._inbox.get()()

    def _add(self, one: _OpenRequest) -> None:
        if one.answer.cancelled():
            return
        self._open[one.name] = one
        if self._failure:
            self._settle(one, AgentError(f"the vLLM engine failed: {self._failure}"))
            return
        try:
            params = self._params(max_tokens=one.max_tokens)
            self._engine.add_request(one.name, {"prompt_token_ids": one.prompt}, params)
        except Exception as error:  # noqa: BLE001  # the engine refuses only this request
            self._settle(one, error)

    def _answer(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            one = self._open.get(output.request_id)
            if one is None or not output.finished:
                continue
            answer, ids = output.outputs[0], list(output.outputs[0].token_ids)
            result: Any
            if list(output.prompt_token_ids) != one.prompt:
                result = RuntimeError("vLLM must answer the prompt that was sent, but answered a different one")
            elif (reason := answer.finish_reason) not in ("stop", "length"):
                result = AgentError(f"the vLLM engine ended an answer with an unexpected finish reason: {reason!r}")
            else:
                steps: Any = answer.logprobs
                known = None if steps is None else [step[token].logprob for step, token in zip(steps, ids, strict=True)]
                result = ids, known
            self._settle(one, result)

    def _settle(self, one: _OpenRequest, result: Any) -> None:
        del self._open[one.name]
        one.loop.call_soon_threadsafe(_set, one.answer, result)

    def _drop(self, one: _OpenRequest) -> None:
        if self._open.pop(one.name, None) is not None and not self._failure:
            self._engine.abort_request([one.name])

    def _end(self) -> None:
        for one in [*self._open.values()]:
            self._drop(one)
        self._is_ending = True


def _set(answer: asyncio.Future[Any], result: Any) -> None:
    if answer.done():
        return  # it was cancelled
    if isinstance(result, BaseException):
        answer.set_exception(result)
    else:
        answer.set_result(result)
