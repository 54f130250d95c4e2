"""Sample the policy in training on a vLLM engine that spans several ranks, in lockstep."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentsgym.agents.base import Agent
from agentsgym.agents.policy.model import budget_within
from agentsgym.agents.trained import DEFAULT_TURN_TOKENS, BatchStart, TrainedPolicy
from agentsgym.agents.vllm.sampling import VLLMSampling
from agentsgym.agents.vllm.weights import EngineWeights
from agentsgym.errors import AgentError, ConfigError
from agentsgym.interruptions import is_interruption
from agentsgym.ranks import all_gather_objects
from agentsgym.types import Action, TurnRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl.generation.vllm_generation import VLLMGeneration


class LockstepVLLMPolicyAgent(Agent, TrainedPolicy):
    """Samples through TRL's ``VLLMGeneration``, in one call for all live episodes, as tensor parallelism requires.

    Weights, sleep and log-probabilities work as in :class:`~agentsgym.agents.vllm.policy.VLLMPolicyAgent`, which
    runs each episode at its own pace and is used if each engine belongs to one rank.

    **Ranks.** A call is collective and requires the same number of rows from every rank. Therefore, before each call,
    the ranks agree on a number of rows and pad to it with one-token prompts, whose answers are discarded; a rank
    without live episodes joins the calls of the others in :meth:`finish`. A call that fails on one rank fails on all
    ranks, and every session of the call receives the error.
    """

    logprobs_match_trained_weights = False

    def __init__(
        self,
        generation: VLLMGeneration,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_turn_tokens: int = DEFAULT_TURN_TOKENS,
        stop: Sequence[str] = (),
    ) -> None:
        """Set the engine's stop tokens; see ``VLLMPolicyAgent`` for arguments and errors.

        Each call also sets the ``max_completion_length`` of ``generation``.
        """
        self.sampling = VLLMSampling(generation, tokenizer, max_turn_tokens, stop)
        self.generation: Any = generation
        self.tokenizer = tokenizer
        self.max_turn_tokens, self.stop_token_ids = max_turn_tokens, self.sampling.stop_token_ids
        self._weights = EngineWeights(generation)
        self.context_length = self.generation.llm.llm_engine.model_config.max_model_len

    def prepare(self, start: BatchStart) -> None:
        """Load new weights, and wake a sleeping engine, as ``VLLMPolicyAgent`` does. Collective."""
        self._weights.load(start.step)

    def weights_loaded(self, step: int) -> None:
        """Record that the trainer itself has loaded the weights of this step; a sleeping engine loads them again."""
        self._weights.loaded(step)

    def weights_changed(self) -> None:
        """Load the weights at the next :meth:`prepare`, even if its step has not changed."""
        self._weights.step = None

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Sample one turn of every session. Collective."""
        if not requests:
            return []
        if any(not request.token_ids for request in requests):
            raise ConfigError("a vLLM policy requires an environment with a tokenizer: it works on token ids, not text")
        limit_name = "the maximum context length of the vLLM engine"
        answers: list[Any] = []
        for request in requests:
            try:
                budget_within(self.context_length, request.token_ids, 1, limit_name, "raise vllm_max_model_length, or ")
                answers.append(None)
            except AgentError as refusal:  # the engine would fail the rows of all ranks
                answers.append(refusal)
        fitting = [place for place, refusal in enumerate(answers) if refusal is None]
        sampled = self._join([requests[place] for place in fitting]) if fitting else ()
        for place, answer in zip(fitting, sampled or (), strict=True):
            answers[place] = answer
        return answers

    def finish(self) -> None:
        """Join the calls of other ranks until no rank has a live episode; then put the engine to sleep. Collective."""
        while self._join(()) is not None:
            pass
        self._weights.sleep()

    def _join(self, requests: Sequence[TurnRequest]) -> list[Action | AgentError] | None:
        """Make one call together with all ranks; return None if no rank has a request. Collective."""
        longest = max(map(self.sampling.room, requests), default=0)
        agreed = all_gather_objects([(len(requests), longest)])
        num_rows, room = (max(numbers) for numbers in zip(*agreed, strict=True))
        if num_rows == 0:
            return None
        prompts = [list(request.token_ids) for request in requests]
        prompts += [[min(self.stop_token_ids, default=0)] for _ in range(num_rows - len(prompts))]
        failure, actions = list[str](), list[Action | AgentError]()
        try:
            answers = self._generate(prompts, room)
            actions += [
                self.sampling.action(request, *one, self._weights.step)
                for request, one in zip(requests, answers, strict=False)
            ]
        except BaseException as error:  # the engine's; raising it here would leave the other ranks waiting
            if is_interruption(error):
                raise
            failure.append(traceback.format_exc())
        if failures := all_gather_objects(failure):
            return [AgentError(f"vLLM failed:\n{failures[0]}") for _ in requests]
        return actions

    def _generate(self, prompts: list[list[int]], room: int) -> list[tuple[list[int], list[float] | None]]:
        """Return the sampled ids of each row and their log-probabilities, NaN where unknown."""
        self.generation.max_completion_length = max(1, room)
        seen, completions, logprobs, _ = self.generation.generate(prompts=prompts, images=None, num_generations=1)
        if list(map(list, seen)) != prompts or len(completions) != len(prompts):
            raise RuntimeError(
                f"vLLM must return one completion for each of the {len(prompts)} prompts, in order, but returned "
                f"{len(completions)} completions or different prompts"
            )
        if logprobs is None:
            return [(list(ids), None) for ids in completions]
        return [  # each token has one entry, its own log-probability, since TRL sets logprobs=0
            (list(ids), [math.nan if token_logprobs[0] is None else token_logprobs[0] for token_logprobs in row])
            for ids, row in zip(completions, logprobs, strict=True)
        ]
