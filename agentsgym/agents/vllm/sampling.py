"""How a policy on vLLM is sampled: its options, the ends of a turn, and the action of an answer."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agentsgym.agents.answers import action_from_ids, as_ids, stop_token_ids
from agentsgym.agents.policy.sampling import StopText
from agentsgym.agents.policy.vocabulary import shared_vocabulary_size
from agentsgym.errors import ConfigError
from agentsgym.types import Action, TurnRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REFUSED_OPTIONS: Final = {
    "n": "a turn has one answer",
    "max_tokens": "each turn has its own budget: set max_turn_tokens",
    "logprobs": "only the log-probability of the sampled token is recorded",
    "temperature": "the loss divides by the trainer's own: set temperature there",
    "seed": "it would give equal prompts equal answers, so that the rollouts of a task would all be the same",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """An engine's sample for one request.

    Attributes:
        token_ids: The ids, (T,).
        logprobs: Their log-probabilities, (T,), NaN where unknown; None if the engine returns none.
        step: The optimizer steps behind the oldest weights that sampled it; None if none were loaded yet.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    step: int | None


class VLLMSampling:
    """The options of a TRL engine, adapted to turns.

    Attributes:
        generation: TRL's ``VLLMGeneration``.
        tokenizer: The model's.
        max_turn_tokens: Budget of a turn whose request sets none.
        stop_token_ids: The ids that end a turn.
    """

    def __init__(
        self, generation: Any, tokenizer: PreTrainedTokenizerBase, max_turn_tokens: int, stop: Sequence[str]
    ) -> None:
        """Set the engine's stop tokens; arguments and errors are those of ``VLLMPolicyAgent``."""
        options = dict(generation.generation_kwargs)
        for name in _REFUSED_OPTIONS.keys() & options.keys():
            raise ConfigError(f"generation_kwargs[{name!r}] = {options[name]!r} is refused: {_REFUSED_OPTIONS[name]}")
        self.generation, self.tokenizer = generation, tokenizer
        self.max_turn_tokens = max_turn_tokens
        model: Any = generation.accelerator.unwrap_model(generation.model)
        shared_vocabulary_size(model, tokenizer)  # refuses a tokenizer with ids that the model does not have
        self.stop_token_ids = stop_token_ids(model, tokenizer) | as_ids(options.get("stop_token_ids"))
        decode: Any = tokenizer.decode
        own: str | Sequence[str] = options.get("stop") or ()
        self._stop_text = StopText((*stop, *([own] if isinstance(own, str) else own)), decode)
        options.update(stop_token_ids=sorted(self.stop_token_ids), stop=list(self._stop_text.stop))
        generation.generation_kwargs = options

    def fields(self) -> dict[str, Any]:
        """Return the options of the engine under vLLM's names, as TRL would pass them on."""
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
        """The budget of a request, in tokens."""
        return self.max_turn_tokens if request.max_new_tokens is None else request.max_new_tokens

    def action(
        self,
        request: TurnRequest,
        ids: Sequence[int],
        logprobs: Sequence[float] | None,
        policy_version: int | None = None,
    ) -> Action:
        """Make the action of an answer, cut to the request's own budget."""
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

    Their class is that of the defaults of the engine in this process.
    """
    defaults: Any = sampling.generation.llm.get_default_sampling_params()
    fields = sampling.fields()
    regex, given = sampling.generation.structured_outputs_regex, fields.get("structured_outputs")
    if regex is not None or isinstance(given, dict):
        structured: Any = sys.modules[type(defaults).__module__].StructuredOutputsParams
        fields["structured_outputs"] = structured(**({"regex": regex} if regex is not None else given or {}))
    # An answer is returned once, complete, and with its text only where the engine looks for stop strings in it.
    whole = type(defaults.output_kind).FINAL_ONLY
    fields = {"detokenize": bool(fields["stop"]), **fields, "n": 1, "output_kind": whole}
    return functools.partial(type(defaults), **fields)
