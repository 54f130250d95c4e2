"""Options for sampling a policy on vLLM, and the conversion of its answers to actions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agentsgym.agents.answers import action_from_ids, as_ids, stop_token_ids
from agentsgym.agents.policy.model import shared_vocabulary_size
from agentsgym.agents.policy.sampling import StopText
from agentsgym.errors import ConfigError
from agentsgym.types import Action, TurnRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REFUSED_OPTIONS: Final = {
    "n": "a turn has one answer",
    "max_tokens": "each turn has its own budget: set max_turn_tokens",
    "logprobs": "only the log-probability of the sampled token is recorded",
    "temperature": "the loss divides by the trainer's temperature: set that one instead",
    "seed": "it would give equal prompts equal answers, so that the rollouts of a task would all be the same",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """An engine's sample for one request.

    Attributes:
        token_ids: The ids, (T,).
        logprobs: Their log-probabilities, (T,), NaN where unknown; None if the engine returns none.
        step: Optimizer step of the oldest weights that sampled it; None if no weights were loaded yet.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    step: int | None


class VLLMSampling:
    """The options of a TRL engine, adapted to turns.

    Attributes:
        generation: TRL's ``VLLMGeneration``.
        tokenizer: The model's tokenizer.
        max_turn_tokens: Token budget of a turn whose request does not set one.
        stop_token_ids: Ids that end a turn.
    """

    def __init__(
        self, generation: Any, tokenizer: PreTrainedTokenizerBase, max_turn_tokens: int, stop: Sequence[str]
    ) -> None:
        """Set the engine's stop tokens; see ``VLLMPolicyAgent`` for arguments and errors."""
        options = dict(generation.generation_kwargs)
        for name in _REFUSED_OPTIONS.keys() & options.keys():
            raise ConfigError(f"generation_kwargs[{name!r}] = {options[name]!r} is refused: {_REFUSED_OPTIONS[name]}")
        self.generation, self.tokenizer = generation, tokenizer
        self.max_turn_tokens = max_turn_tokens
        model: Any = generation.accelerator.unwrap_model(generation.model)
        shared_vocabulary_size(model, tokenizer)  # refuses a tokenizer with ids that the model does not have
        self.stop_token_ids = stop_token_ids(model, tokenizer) | as_ids(options.get("stop_token_ids"))
        decode: Any = tokenizer.decode  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        engine_stop: str | Sequence[str] = options.get("stop") or ()
        self._stop_text = StopText((*stop, *([engine_stop] if isinstance(engine_stop, str) else engine_stop)), decode)
        options.update(stop_token_ids=sorted(self.stop_token_ids), stop=list(self._stop_text.stop))
        generation.generation_kwargs = options

    def fields(self) -> dict[str, Any]:
        """Return the engine's sampling options under vLLM's names, as TRL would pass them."""
        engine = self.generation
        return {
            "repetition_penalty": engine.repetition_penalty,
            "temperature": engine.temperature,
            "top_p": engine.top_p,
            "top_k": engine.top_k,
            "min_p": 0.0 if engine.min_p is None else engine.min_p,
            "logprobs": engine.logprobs,
            **engine.generation_kwargs,
        }

    def room(self, request: TurnRequest) -> int:
        """The token budget of a request."""
        return self.max_turn_tokens if request.max_new_tokens is None else request.max_new_tokens

    def action(
        self,
        request: TurnRequest,
        ids: Sequence[int],
        logprobs: Sequence[float] | None,
        policy_version: int | None = None,
    ) -> Action:
        """Convert an answer to an action, truncated to the request's budget."""
        room = self.room(request)
        return action_from_ids(
            request,
            ids[:room],
            self.tokenizer,
            self.stop_token_ids,
            logprobs=None if logprobs is None else logprobs[:room],
            text_before_stop=self._stop_text.before,
            policy_version=policy_version,
        )


def engine_params(sampling: VLLMSampling) -> Callable[..., Any]:
    """Make a function that returns vLLM's ``SamplingParams`` for ``max_tokens``, without importing vLLM.

    The class is that of the engine's default parameters.
    """
    defaults: Any = sampling.generation.llm.get_default_sampling_params()
    fields = sampling.fields()
    regex, configured = sampling.generation.structured_outputs_regex, fields.get("structured_outputs")
    if regex is not None or isinstance(configured, dict):
        structured: Any = sys.modules[type(defaults).__module__].StructuredOutputsParams
        fields["structured_outputs"] = structured(**({"regex": regex} if regex is not None else configured or {}))
    # Each answer is returned once, when it is complete; it is decoded only if the engine must find stop strings in it.
    final_only: Any = type(defaults.output_kind).FINAL_ONLY  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    fields = {"detokenize": bool(fields["stop"]), **fields, "n": 1, "output_kind": final_only}  # pyright: ignore[reportUnknownVariableType]
    return functools.partial(type(defaults), **fields)
