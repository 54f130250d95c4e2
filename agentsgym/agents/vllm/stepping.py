"""Step a vLLM engine of this process on a thread, while requests come and go: no answer waits for another.

::

    agents' loop   sample ─┐ sample ─┐                 ┌─▶ answer of the first
    engine thread    step  add  step add  step … step ─┘  step …      nothing open: it waits

Only methods of the engine are called; the package is not imported.
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

STEP_LIMIT_S: Final = 60.0  # for the step that runs when a rollout ends; after that, it counts as hanging


@dataclass(frozen=True, slots=True)
class _Open:
    """A request in the engine, and the future of its answer."""

    name: str
    prompt: list[int]
    max_tokens: int
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]


class SteppedEngine:
    """Answers requests one by one, from a ``vllm.LLM`` that a thread steps while any is open.

    The thread lives from the first request to :meth:`finish`, and only it uses the engine meanwhile. An engine that
    breaks is not called again: with the requests that it then still holds, its next call would not return.

    Attributes:
        step: The optimizer steps behind its weights, recorded in each answer.
    """

    def __init__(self, sampling: VLLMSampling) -> None:
        """Read the engine's settings; nothing is sampled."""
        self.step: int | None = None
        self._engine: Any = sampling.generation.llm.llm_engine
        self._params = engine_params(sampling)
        self._context: int = self._engine.model_config.max_model_len
        self._device: torch.device = sampling.generation.accelerator.device
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open: dict[str, _Open] = {}  # used only on the thread
        self._names = (f"agentsgym-{number}" for number in itertools.count())
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._broke = ""

    async def sample(self, session_id: str, prompt: list[int], room: int) -> Sampled:
        """Answer one prompt with at most ``room`` tokens; cancellation takes the request out again.

        Raises:
            AgentError: The engine failed, now or earlier, or the prompt does not fit into its context.
        """
        if self._broke:
            raise AgentError(f"the vLLM engine failed in an earlier call and is not called again: {self._broke}")
        holder = "the maximum context length of the vLLM engine"
        room = max(1, budget_within(self._context, prompt, room, holder, "raise vllm_max_model_length, or "))
        loop, step = asyncio.get_running_loop(), self.step
        one = _Open(next(self._names), prompt, room, loop, loop.create_future())
        if self._thread is None:
            self._is_ending = False
            # Work that this thread's stream has queued on the device (weights) comes before the engine's.
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
        """Abort open requests, and end the thread; if its step hangs, it is abandoned together with the engine."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._inbox.put(self._end)
        thread.join(STEP_LIMIT_S)
        if thread.is_alive():
            self._broke = f"one of its steps did not end within {STEP_LIMIT_S:g} s"

    def check(self) -> None:
        """Raise :class:`AgentsGymError` if the engine failed: it gets no more weights."""
        if self._broke:
            raise AgentsGymError(
                f"the vLLM engine failed and is not called again: {self._broke}; restart the run from its last "
                "checkpoint"
            )

    # On the thread

    def _run(self, stream: Any) -> None:
        if stream is not None:
            torch.accelerator.set_stream(stream)  # and with it the device, which each thread has its own of
        try:
            while not self._is_ending:
                if not self._open:
                    self._inbox.get()()
                while not self._inbox.empty():
                    self._inbox.get()()
                if self._open:
                    self._answer(self._engine.step())
        except BaseException as error:  # noqa: BLE001  # the engine's: it goes to all open requests
            self._broke = f"{type(error).__name__}: {sentence_of(error)}"
            for one in [*self._open.values()]:
                self._settle(one, AgentError(f"the vLLM engine failed: {self._broke}"))
            self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Answer incoming requests with the failure of the engine, until the rollout ends."""
        while not self._is_ending:
            self._inbox.get()()

    def _add(self, one: _Open) -> None:
        if one.answer.cancelled():
            return
        self._open[one.name] = one
        if self._broke:
            self._settle(one, AgentError(f"the vLLM engine failed: {self._broke}"))
            return
        try:
            params = self._params(max_tokens=one.max_tokens)
            self._engine.add_request(one.name, {"prompt_token_ids": one.prompt}, params)
        except Exception as error:  # noqa: BLE001  # it refuses this request, and continues with the others
            self._settle(one, error)

    def _answer(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            one = self._open.get(output.request_id)
            if one is None or not output.finished:
                continue
            answer, ids = output.outputs[0], list(output.outputs[0].token_ids)
            result: Any
            if list(output.prompt_token_ids) != one.prompt:
                result = RuntimeError("vLLM must answer the prompt it is given, but answered a different one")
            elif (reason := answer.finish_reason) not in ("stop", "length"):
                result = AgentError(f"the vLLM engine ended an answer with an unexpected finish reason: {reason!r}")
            else:
                steps: Any = answer.logprobs
                known = None if steps is None else [step[token].logprob for step, token in zip(steps, ids, strict=True)]
                result = ids, known
            self._settle(one, result)

    def _settle(self, one: _Open, result: Any) -> None:
        del self._open[one.name]
        one.loop.call_soon_threadsafe(_set, one.answer, result)

    def _drop(self, one: _Open) -> None:
        if self._open.pop(one.name, None) is not None and not self._broke:
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
