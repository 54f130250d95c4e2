"""Sample the policy in training on vLLM: each episode at its own pace, with token ids as input and output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentsgym.agents.base import AsyncAgent
from agentsgym.agents.trained import DEFAULT_TURN_TOKENS, BatchStart, TrainedPolicy
from agentsgym.agents.vllm.fleet import VLLMServers
from agentsgym.agents.vllm.sampling import VLLMSampling
from agentsgym.agents.vllm.stepping import SteppedEngine
from agentsgym.agents.vllm.weights import EngineWeights, ServerWeights
from agentsgym.errors import ConfigError
from agentsgym.event_loop import run_coroutine
from agentsgym.ranks import raise_on_all_ranks
from agentsgym.types import Action, TurnRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl.generation.vllm_generation import VLLMGeneration


class VLLMPolicyAgent(AsyncAgent, TrainedPolicy):
    """Samples the policy on vLLM, one request for each turn of each episode, sent as soon as the episode is ready.

    If TRL's ``VLLMGeneration`` is colocated, a thread steps its engine while any request is open, and new requests join
    between two steps. With servers, each rank sends its own requests: a session stays with one server, whose prefix
    cache contains its history, and only the main rank pushes the weights, through TRL's client. So no episode waits for
    the slowest one, and only :meth:`prepare` is collective.

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
