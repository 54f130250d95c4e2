"""Sample the policy in training on vLLM: each episode at its own pace, with token ids as input and output.

An engine in this process steps in a thread while requests come and go, so that no answer waits for another::

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
from typing import TYPE_CHECKING, Any, Final

import torch

from agentsgym.agents.base import AsyncAgent
from agentsgym.agents.policy.model import budget_within
from agentsgym.agents.trained import DEFAULT_TURN_TOKENS, BatchStart, TrainedPolicy
from agentsgym.agents.vllm.fleet import VLLMServers
from agentsgym.agents.vllm.sampling import Sampled, VLLMSampling, engine_params
from agentsgym.agents.vllm.weights import EngineWeights, ServerWeights
from agentsgym.errors import AgentError, AgentsGymError, ConfigError
from agentsgym.event_loop import run_coroutine
from agentsgym.ranks import raise_on_all_ranks
from agentsgym.texts import sentence_of
from agentsgym.types import Action, TurnRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl.generation.vllm_generation import VLLMGeneration


class VLLMPolicyAgent(AsyncAgent, TrainedPolicy):
    """Samples the policy on vLLM, one request for each turn of each episode, sent as soon as the episode is ready.

    If TRL's ``VLLMGeneration`` is colocated, a thread steps its engine while any request is open, and new requests join
    between two steps. With servers, each rank sends its own requests: a session stays with one server, whose prefix
    cache contains its history, and only the main rank pushes the weights, through TRL's client, or lets servers load
    the adapters. So no episode waits for the slowest one, and only :meth:`prepare` is collective.

    The engine has its own copy of the weights, so :meth:`prepare` must be called before each rollout: it loads the
    trained weights if they have changed. In sleep mode, it also wakes the engine, and :meth:`finish` puts it to sleep,
    once per rollout.

    The log-probabilities are vLLM's, for the distribution that was sampled from: after temperature, repetition penalty
    and truncation by ``top_k``, ``top_p`` and ``min_p``. With truncation, they are larger than the policy's own. If
    vLLM returns none, they are NaN. Tokens are drawn with the engine's random generator, which is not seeded here.
    """

    logprobs_match_trained_weights = False

    def __init__(
        self,
        generation: VLLMGeneration,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_turn_tokens: int = DEFAULT_TURN_TOKENS,
        stop: Sequence[str] = (),
        server_urls: Sequence[str] = (),
        pauses: bool = False,
    ) -> None:
        """Set the engine's stop tokens: those of the model, the tokenizer and the chat template.

        Args:
            generation: TRL's engine; the stop tokens are added to its ``generation_kwargs``.
            tokenizer: The model's tokenizer.
            max_turn_tokens: Token budget of a turn whose request does not set one.
            stop: Texts that end a turn, in addition to those in ``generation_kwargs``. Their tokens are part of the
                action, but its text ends before them.
            server_urls: Base URLs of the servers, beginning with the server of ``generation``'s client; empty if it is
                the only one.
            pauses: Whether servers must pause while weights are pushed, because requests are open then.

        Raises:
            ConfigError: ``generation_kwargs`` has an option that is invalid for multi-turn sampling, the tokenizer has
                ids that the model does not have, or the engine spans several ranks, which requires lockstep.
            MissingDependencyError: There are servers, and ``aiohttp`` is not installed.
        """
        self.sampling = VLLMSampling(generation, tokenizer, max_turn_tokens, stop)
        self.generation, self.tokenizer = generation, tokenizer
        self.max_turn_tokens, self.stop_token_ids = max_turn_tokens, self.sampling.stop_token_ids
        self.samples_during_updates = generation.mode == "server"
        self._weights: EngineWeights | ServerWeights
        self._engine: SteppedEngine | VLLMServers
        if generation.mode == "server":
            client_url: str = generation.server_base_url or f"http://{generation.server_host}:{generation.server_port}"
            rank: int = generation.accelerator.process_index
            self._engine = VLLMServers(self.sampling, server_urls or [client_url], rank)
            self._weights = ServerWeights(generation, self._engine, tokenizer, pauses=pauses)
            return
        if generation.tensor_parallel_size > 1:
            raise ConfigError("an engine that spans several ranks samples in lockstep: use LockstepVLLMPolicyAgent")
        self._engine, self._weights = SteppedEngine(self.sampling), EngineWeights(generation)
        self.context_length = self._engine.context

    def forget(self, session_ids: Sequence[str]) -> None:
        """Forget sessions that have ended, while others continue."""
        if isinstance(self._engine, VLLMServers):
            run_coroutine(self._engine.forget(session_ids))

    def prepare(self, start: BatchStart) -> None:
        """Load new weights, and wake a sleeping engine, before a generation batch. Collective.

        The weights are pushed again to servers that were restarted.

        Args:
            start: The batch; batches with equal ``step`` are assumed to have equal weights.

        Raises:
            AgentsGymError: Another rank failed (which raises its own error), no server responds, or the weights could
                not be pushed in time.
        """
        with raise_on_all_ranks():
            if isinstance(self._engine, SteppedEngine):
                self._engine.check()
        self._weights.load(start.step)
        if isinstance(self._engine, SteppedEngine):
            self._engine.step = start.step
            return
        known = self.context_length, *(server.context for server in self._engine.servers)
        self.context_length = min((length for length in known if length), default=None)

    def weights_loaded(self, step: int) -> None:
        """Record that the trainer itself has loaded the weights of this step; a sleeping engine loads them again."""
        self._weights.loaded(step)

    def weights_changed(self) -> None:
        """Load the weights at the next :meth:`prepare`, even if its step has not changed."""
        self._weights.step = None

    async def aact(self, request: TurnRequest) -> Action:
        """Sample one turn of one session."""
        if not request.token_ids:
            raise ConfigError(
                "a VLLMPolicyAgent requires an environment with a tokenizer: it works on token ids, not text"
            )
        sampled = await self._engine.sample(request.session_id, list(request.token_ids), self.sampling.room(request))
        return self.sampling.action(request, sampled.token_ids, sampled.logprobs, sampled.step)

    def finish(self) -> None:
        """Stop the thread that steps the engine, or close the connections; in sleep mode, put the engine to sleep."""
        self._engine.finish()
        if isinstance(self._weights, EngineWeights):
            self._weights.sleep()


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
        context: Maximum number of tokens of a prompt and its answer.
    """

    def __init__(self, sampling: VLLMSampling) -> None:
        self.step: int | None = None
        self._engine: Any = sampling.generation.llm.llm_engine
        self._params = engine_params(sampling)
        self.context: int = self._engine.model_config.max_model_len
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
        room = max(1, budget_within(self.context, prompt, room, limit_name, "raise vllm_max_model_length, or "))
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
