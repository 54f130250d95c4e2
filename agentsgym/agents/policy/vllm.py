"""Sample the policy in training on vLLM: TRL's engines, colocated or behind a server, token ids in and out."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Final

from agentsgym.agents.answers import action_from_ids
from agentsgym.agents.base import Agent
from agentsgym.agents.policy.agent import DEFAULT_TURN_TOKENS
from agentsgym.agents.policy.ranks import all_gather_objects, raise_on_all_ranks
from agentsgym.agents.policy.sampling import StopText
from agentsgym.agents.policy.vocabulary import shared_vocabulary_size
from agentsgym.agents.stop_tokens import as_ids, stop_token_ids
from agentsgym.agents.trained import BatchStart
from agentsgym.agents.vllm_engine import FailFastEngine
from agentsgym.errors import AgentError, ConfigError
from agentsgym.interruptions import is_interruption
from agentsgym.types import Action, TurnRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl.generation.vllm_generation import VLLMGeneration

Answer = tuple[list[int], list[float] | None]  # the ids sampled for one row, and their log-probabilities

_REFUSED_OPTIONS: Final = {
    "n": "a turn has one answer",
    "max_tokens": "each turn has its own budget: set max_turn_tokens",
    "logprobs": "only the log-probability of the sampled token is recorded",
    "temperature": "the loss divides by the trainer's own: set temperature there",
    "seed": "it would give equal prompts equal answers, so that the rollouts of a task would all be the same",
}


class VLLMPolicyAgent(Agent):
    """Samples the policy through TRL's ``VLLMGeneration`` for all live episodes at once.

    The engine keeps the keys and values of earlier turns in its prefix cache. It samples from weights of its own, so
    :meth:`prepare` must be called before each rollout: it loads the trained ones if they have changed. Under sleep mode
    it also wakes the engine, which :meth:`finish` puts to sleep, once a rollout and not once a turn.

    The log-probabilities are vLLM's, of the distribution that was drawn from: after the temperature, the repetition
    penalty and the cuts of ``top_k``, ``top_p`` and ``min_p``. With cuts they are larger than the policy's own. Where
    vLLM returns none it is NaN. Draws come from the engine's own generator, which is not seeded here.

    **Ranks.** Behind a server, and with tensor parallelism, a call is collective and takes equally many rows from every
    rank. So the ranks agree on a number of rows before each call and pad to it with rows of one token, whose answers
    are discarded; a rank without live episodes joins the calls of the others in :meth:`finish`. A call that fails on
    one rank fails on all of them: every session of the call gets the error.
    """

    logprobs_are_of_trained_weights = False

    def __init__(
        self,
        generation: VLLMGeneration,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_turn_tokens: int = DEFAULT_TURN_TOKENS,
        stop: Sequence[str] = (),
    ) -> None:
        """Set the engine's stop tokens: those of the model, the tokenizer and the chat template.

        Args:
            generation: TRL's engine; from here on its ``generation_kwargs`` hold the stop tokens, and its
                ``max_completion_length`` is set at each call.
            tokenizer: The model's.
            max_turn_tokens: The budget of a turn for which the request sets none.
            stop: Texts that end a turn too, beside those of ``generation_kwargs``. Their tokens stay in the action,
                its text ends before them.

        Raises:
            ConfigError: ``generation_kwargs`` hold what would go silently wrong over many turns, or the tokenizer has
                ids that the model does not.
        """
        options = dict(generation.generation_kwargs)
        for name in _REFUSED_OPTIONS.keys() & options.keys():
            raise ConfigError(f"generation_kwargs[{name!r}] = {options[name]!r} is refused: {_REFUSED_OPTIONS[name]}")
        self.generation, self.tokenizer = generation, tokenizer
        self.max_turn_tokens = max_turn_tokens
        model: Any = generation.accelerator.unwrap_model(generation.model)
        shared_vocabulary_size(model, tokenizer)  # refuses a tokenizer with ids that the model does not have
        self.stop_token_ids = stop_token_ids(model, tokenizer) | as_ids(options.get("stop_token_ids"))
        decode: Any = tokenizer.decode
        self._stop_text = StopText((*stop, *_texts(options.get("stop"))), decode)
        options.update(stop_token_ids=sorted(self.stop_token_ids), stop=list(self._stop_text.stop))
        generation.generation_kwargs = options
        is_server = generation.mode == "server"
        self._sleeps: bool = not is_server and generation.enable_sleep_mode
        self._is_collective: bool = is_server or generation.tensor_parallel_size > 1
        self._call = FailFastEngine(getattr(generation, "llm", None))
        self._loaded_step: int | None = None

    def prepare(self, start: BatchStart) -> None:
        """Collective: get the engine ready for a generation batch: load new weights, and wake it.

        Its draws are not seeded: see the class.

        Args:
            start: Equal values of its ``step``, the optimizer steps that are done, are taken for equal weights.

        Raises:
            AgentsGymError: It failed on another rank, which raises its own error.
        """
        if start.step == self._loaded_step and not self._sleeps:
            return
        self._loaded_step = None
        with raise_on_all_ranks():
            self.generation.sync_weights()
            self._wake()
        self._loaded_step = start.step

    def weights_loaded(self, step: int) -> None:
        """Note that the trainer itself has loaded the weights of this step; an engine that sleeps loads them again."""
        self._loaded_step = step

    def weights_changed(self) -> None:
        """Load the weights at the next :meth:`prepare`, whatever its step."""
        self._loaded_step = None

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Collective behind a server and with tensor parallelism: sample one turn of every session."""
        if not requests:
            return []
        if any(not request.token_ids for request in requests):
            raise ConfigError("a VLLMPolicyAgent needs an environment with a tokenizer: it reads token ids, not text")
        if self._is_collective:
            return self._join(requests) or ()
        prompts = [list(request.token_ids) for request in requests]
        answers = self._call(self._generate, prompts, self._longest(requests))
        return [self._action(request, *answer) for request, answer in zip(requests, answers, strict=True)]

    def finish(self) -> None:
        """Collective: join the calls of other ranks until none has a live episode, then put the engine to sleep."""
        if self._is_collective:
            while self._join(()) is not None:
                pass
        if self._sleeps and not self.generation.enable_sleep_mode:
            self.generation.llm.sleep(level=2)
            self.generation.enable_sleep_mode = True

    def _wake(self) -> None:
        """Wake the parts that loading weights does not, and keep TRL from ending each call with sleep."""
        if self._sleeps and self.generation.enable_sleep_mode:
            self.generation.llm.wake_up(tags=["kv_cache"])
            self.generation.enable_sleep_mode = False

    def _join(self, requests: Sequence[TurnRequest]) -> list[Action | AgentError] | None:
        """Collective: make one call together with all ranks; None once no rank has a request."""
        agreed = all_gather_objects([(len(requests), self._longest(requests))])
        num_rows, room = (max(numbers) for numbers in zip(*agreed, strict=True))
        if num_rows == 0:
            return None
        prompts = [list(request.token_ids) for request in requests]
        prompts += [[min(self.stop_token_ids, default=0)] for _ in range(num_rows - len(prompts))]
        failure, actions = list[str](), list[Action | AgentError]()
        try:
            answers = self._generate(prompts, room)
            actions += [self._action(request, *answer) for request, answer in zip(requests, answers, strict=False)]
        except BaseException as error:  # the engine's or the server's: raised here, it would leave the others waiting
            if is_interruption(error):
                raise
            failure.append(traceback.format_exc())
        if failures := all_gather_objects(failure):
            return [AgentError(f"vLLM failed:\n{failures[0]}") for _ in requests]
        return actions

    def _generate(self, prompts: list[list[int]], room: int) -> list[Answer]:
        self.generation.max_completion_length = max(1, room)
        with _main_rank_comes_back(self.generation) as errors:
            seen, completions, logprobs, _ = self.generation.generate(prompts=prompts, images=None, num_generations=1)
        if errors:
            raise errors[0]
        if list(map(list, seen)) != prompts or len(completions) != len(prompts):
            raise RuntimeError(
                f"vLLM must answer the {len(prompts)} prompts it is given, in order, but answered others"
            )
        if logprobs is None:
            return [(list(ids), None) for ids in completions]
        return [
            (list(ids), [math.nan if likeliest[0] is None else likeliest[0] for likeliest in row])
            for ids, row in zip(completions, logprobs, strict=True)
        ]

    def _longest(self, requests: Sequence[TurnRequest]) -> int:
        return max(map(self._room, requests), default=0)

    def _room(self, request: TurnRequest) -> int:
        return self.max_turn_tokens if request.max_new_tokens is None else request.max_new_tokens

    def _action(self, request: TurnRequest, ids: list[int], logprobs: list[float] | None) -> Action:
        """Cut an answer to its own budget: the engine was given the largest of all."""
        room = self._room(request)
        return action_from_ids(
            request,
            ids[:room],
            self.tokenizer,
            self.stop_token_ids,
            logprobs=None if logprobs is None else logprobs[:room],
            text_before_stop=self._stop_text.before,
        )


@contextlib.contextmanager
def _main_rank_comes_back(generation: Any) -> Generator[list[BaseException]]:
    """Collect what a server's client raises, and return empty answers in its place.

    The client is called on the main rank alone, while the other ranks wait for the answers to be broadcast.
    """
    errors: list[BaseException] = []
    if generation.mode != "server" or not generation.accelerator.is_main_process:
        yield errors
        return
    client, original = generation.vllm_client, generation.vllm_client.generate

    def generate(prompts: list[list[int]], **options: Any) -> dict[str, Any]:
        try:
            return original(prompts=prompts, **options)
        except BaseException as error:  # the server's; raised once all ranks are back
            if is_interruption(error):
                raise
            errors.append(error)
            return {"prompt_ids": prompts, "completion_ids": [[] for _ in prompts], "logprobs": None}

    client.generate = generate
    try:
        yield errors
    finally:
        client.generate = original


def _texts(stop: str | Sequence[str] | None) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop or ()
