"""The policy in training as an agent on vLLM: TRL's engines, colocated or behind a server, token ids in and out."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Final

from agentsgym.agents.base import Agent
from agentsgym.agents.engine import Guarded
from agentsgym.agents.policy import DEFAULT_TURN_TOKENS
from agentsgym.agents.sampling import StopText
from agentsgym.agents.stopping import as_ids, stop_token_ids
from agentsgym.errors import AgentFault, ConfigError
from agentsgym.training.ranks import gathered, raised_together
from agentsgym.types import Action, TurnRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl.generation.vllm_generation import VLLMGeneration

Answer = tuple[list[int], list[float] | None]  # the ids that one row was given and their log-probabilities

_REFUSED_OPTIONS: Final = {
    "n": "a turn has one answer",
    "max_tokens": "each turn has its own budget: set max_turn_tokens",
    "logprobs": "the log-probability of the sampled token is what is recorded",
    "temperature": "the loss divides by the trainer's own: set temperature there",
    "seed": "it would give equal prompts equal answers, so that the rollouts of a task were one and the same",
}


class VLLMPolicyAgent(Agent):
    """Samples the policy through TRL's ``VLLMGeneration`` for all live episodes at once.

    The engine keeps the keys and values of earlier turns in its prefix cache. It samples from weights of its own, so
    :meth:`begin` is to be called before each rollout: it hands over the trained ones if they have moved. Under sleep
    mode it also wakes the engine, which :meth:`finish` puts to sleep, once a rollout and not once a turn.

    The log-probabilities are vLLM's, of the distribution that was drawn from: after the temperature, the repetition
    penalty and the cuts of ``top_k``, ``top_p`` and ``min_p``. With cuts they are larger than the policy's own. Where
    vLLM could not tell one it is NaN. Draws come from the engine's generator, which no seed of ours reaches.

    **Ranks.** Behind a server, and with tensor parallelism, a call is collective and takes equally many rows from every
    rank. So the ranks agree on a number of rows before each call and pad to it with rows of one token, whose answers
    nobody reads; a rank without live episodes goes on joining in :meth:`finish`. What fails on one rank fails the turn
    on all of them: every session of the call is given the fault.
    """

    def __init__(
        self,
        generation: VLLMGeneration,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_turn_tokens: int = DEFAULT_TURN_TOKENS,
        stop: Sequence[str] = (),
    ) -> None:
        """Tell the engine where an answer ends: at each of the model's, the tokenizer's and the template's end ids.

        Args:
            generation: TRL's engine; from here on its ``generation_kwargs`` hold the ends of a turn, and its
                ``max_completion_length`` is set at each call.
            tokenizer: The model's.
            max_turn_tokens: The budget of a turn for which the request sets none.
            stop: Texts that end a turn too, beside those of ``generation_kwargs``. Their tokens stay in the action,
                its text ends in front of them.

        Raises:
            ConfigError: ``generation_kwargs`` hold what would go silently wrong over many turns.
        """
        options = dict(generation.generation_kwargs)
        for name in _REFUSED_OPTIONS.keys() & options.keys():
            raise ConfigError(f"generation_kwargs[{name!r}] = {options[name]!r} is refused: {_REFUSED_OPTIONS[name]}")
        self.generation, self.tokenizer = generation, tokenizer
        self.max_turn_tokens = max_turn_tokens
        model: Any = generation.accelerator.unwrap_model(generation.model)
        self.stop_token_ids = stop_token_ids(model, tokenizer) | as_ids(options.get("stop_token_ids"))
        decode: Any = tokenizer.decode
        self._stop_text = StopText((*stop, *_texts(options.get("stop"))), decode)
        options.update(stop_token_ids=sorted(self.stop_token_ids), stop=list(self._stop_text.stop))
        generation.generation_kwargs = options
        is_server = generation.mode == "server"
        self._sleeps: bool = not is_server and generation.enable_sleep_mode
        self._in_step: bool = is_server or generation.tensor_parallel_size > 1
        self._call = Guarded(getattr(generation, "llm", None))
        self._loaded_step: int | None = None

    def begin(self, step: int) -> None:
        """Make the engine ready for a rollout, on all ranks together: weights up to date, and awake.

        Args:
            step: The number of optimizer steps done; equal numbers are taken for equal weights.

        Raises:
            AgentsGymError: It failed on another rank; the rank on which it did raises its own error.
        """
        if step == self._loaded_step and not self._sleeps:
            return
        self._loaded_step = None
        with raised_together():
            self.generation.sync_weights()
            self._wake()
        self._loaded_step = step

    def weights_changed(self) -> None:
        """Hand the weights over at the next :meth:`begin`, whatever its step: they were loaded or trained elsewhere."""
        self._loaded_step = None

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentFault]:
        """Sample one turn of every session."""
        if not requests:
            return []
        if any(not request.token_ids for request in requests):
            raise ConfigError("a VLLMPolicyAgent needs an environment with a tokenizer: it reads token ids, not text")
        if self._in_step:
            return self._join(requests) or ()
        prompts = [list(request.token_ids) for request in requests]
        answers = self._call(self._generate, prompts, self._longest(requests))
        return [self._action(request, *answer) for request, answer in zip(requests, answers, strict=True)]

    def finish(self) -> None:
        """Join the calls of other ranks until none has a live episode, then let the engine sleep if it is to."""
        if self._in_step:
            while self._join(()) is not None:
                pass
        if self._sleeps and not self.generation.enable_sleep_mode:
            self.generation.llm.sleep(level=2)
            self.generation.enable_sleep_mode = True

    def _wake(self) -> None:
        """Wake what handing over the weights does not, and keep TRL from going to sleep after each call."""
        if self._sleeps and self.generation.enable_sleep_mode:
            self.generation.llm.wake_up(tags=["kv_cache"])
            self.generation.enable_sleep_mode = False

    def _join(self, requests: Sequence[TurnRequest]) -> list[Action | AgentFault] | None:
        """Make one call together with all ranks; None once no rank has a request."""
        agreed = gathered([(len(requests), self._longest(requests))])
        num_rows, room = (max(numbers) for numbers in zip(*agreed, strict=True))
        if num_rows == 0:
            return None
        prompts = [list(request.token_ids) for request in requests]
        prompts += [[min(self.stop_token_ids, default=0)] for _ in range(num_rows - len(prompts))]
        failure, actions = list[str](), list[Action | AgentFault]()
        try:
            answers = self._generate(prompts, room)
            actions += [self._action(request, *answer) for request, answer in zip(requests, answers, strict=False)]
        except Exception:  # noqa: BLE001  # the engine's or the server's: raised here, it would part the ranks
            failure.append(traceback.format_exc())
        if failures := gathered(failure):
            return [AgentFault(f"vLLM failed:\n{failures[0]}") for _ in requests]
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
        """Cut an answer to its own room: the engine was given the largest of all."""
        room = self._room(request)
        ids = ids[:room]
        ended_by_id = bool(ids) and ids[-1] in self.stop_token_ids
        text = str(self.tokenizer.decode(ids[:-1] if ended_by_id else ids, skip_special_tokens=True))
        said = self._stop_text.before(text)
        return Action(
            text=said,
            token_ids=ids,
            logprobs=None if logprobs is None else logprobs[:room],
            agent_state=request.agent_state,
            finish_reason="stop" if ended_by_id or said != text else "length",
        )


@contextlib.contextmanager
def _main_rank_comes_back(generation: Any) -> Generator[list[Exception]]:
    """Collect what a server's client raises and make the call look answered.

    It is called on the main rank alone, while the other ranks wait for the answers to be broadcast.
    """
    errors: list[Exception] = []
    if generation.mode != "server" or not generation.accelerator.is_main_process:
        yield errors
        return
    client, ask = generation.vllm_client, generation.vllm_client.generate

    def generate(prompts: list[list[int]], **options: Any) -> dict[str, Any]:
        try:
            return ask(prompts=prompts, **options)
        except Exception as error:  # noqa: BLE001  # the server's; raised once all ranks are back
            errors.append(error)
            return {"prompt_ids": prompts, "completion_ids": [[] for _ in prompts], "logprobs": None}

    client.generate = generate
    try:
        yield errors
    finally:
        client.generate = ask


def _texts(stop: str | Sequence[str] | None) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop or ()
