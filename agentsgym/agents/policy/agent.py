"""The policy in training as an agent: batched sampling on transformers, with a cache that is kept across turns."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentsgym.agents.answers import stop_token_ids
from agentsgym.agents.base import Agent
from agentsgym.agents.policy.decoding import CachedPrefix, Decoder
from agentsgym.agents.policy.decoding_strategy import select_strategy
from agentsgym.agents.policy.model import (
    budget_within,
    check_is_model,
    evaluation_mode,
    num_positions,
    shared_vocabulary_size,
    tokenizer_in,
)
from agentsgym.agents.policy.sampling import Sampler, SamplingParams, StopText, seen_tokens
from agentsgym.agents.trained import DEFAULT_TURN_TOKENS, BatchStart, TrainedPolicy
from agentsgym.errors import AgentError, ConfigError
from agentsgym.fields import Check, is_int, or_none, require
from agentsgym.seeding import derive_seed
from agentsgym.types import Action, TurnRequest

_TOKENS_AHEAD = 32  # random numbers that are moved to the device together


@dataclass(eq=False, slots=True)
class _SamplingState:
    """The state of one conversation: its random numbers, its cached prefix, and the sample of this turn."""

    rng: random.Random
    uniforms: list[float] = field(default_factory=list[float])  # drawn ahead, from the turn's first token on
    prefix: CachedPrefix = field(default_factory=CachedPrefix)
    sampled: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    limit: int = 0
    stopped: bool = False

    @property
    def is_open(self) -> bool:
        return not self.stopped and len(self.sampled) < self.limit

    def uniforms_of(self, start: int, stop: int) -> list[float]:
        self.uniforms += [self.rng.random() for _ in range(stop - len(self.uniforms))]
        return self.uniforms[start:stop]


class PolicyAgent(Agent, TrainedPolicy):
    """An agent that samples from a causal language model, in one batch for all live episodes, on token ids.

    Each turn costs one prefill of the new observation and one forward pass per token: history stays in the cache as
    long as the prompt continues it, and a rewritten prompt is recomputed from where it differs. After the weights
    change, everything is recomputed. A model whose cache cannot be kept is prefilled at each turn, with a warning; a
    model that cannot be sampled exactly raises ``ConfigError`` at the first turn.

    A prompt that fills the model's positions (``max_position_embeddings``) fails only its session; an answer ends at
    the last position, and an episode before a prompt that leaves no room, with ``max_tokens``.

    Each conversation has its own random generator, so that its answers, up to rounding, do not depend on which others
    are live or on their order in a batch, only on the agent's seed and the request's, if it has one. The
    log-probabilities are those of the distribution at ``temperature``, before ``top_k``, ``top_p``, ``min_p`` and the
    repetition penalty.

    Rows of the embedding beyond the tokenizer's ids (Qwen3 has 267 of them) are never sampled, and the
    log-probabilities are those of the distribution without them. A softmax over all rows, as in the loss, yields
    log-probabilities that are lower by ``-log(1 - p)``, where ``p`` is the total probability of those rows: negligible
    for a trained model, and part of what :func:`agentsgym.training.drift.logprob_gap` measures.
    """

    logprobs_match_trained_weights = True
    _moves_weights = False  # whether a forward pass may leave weights gathered

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        max_turn_tokens: int = DEFAULT_TURN_TOKENS,
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """Set up sampling; nothing is run.

        Args:
            model: A causal language model.
            tokenizer: The model's tokenizer, or a processor with it.
            sampling: Sampling settings; by default temperature 1 without top-k, top-p or min-p.
            seed: Seed of this agent's random draws; torch's global generator is neither used nor changed.
            max_turn_tokens: Token budget of turns whose request has none.
            context: Context manager for the forward passes of each turn (autocast, for example).

        Raises:
            ConfigError: The first argument is not a model, the model is not a decoder-only model, or the tokenizer is
                not its own: it has more ids, or others than the tokenizer in the model's folder.
            TemplateError: The chat template does not allow exact tokens.
        """
        check_is_model(model, f"{type(self).__name__}(model, tokenizer)")
        is_valid: Check = lambda value: isinstance(value, SamplingParams)  # noqa: E731
        require(
            f"{type(self).__name__}(sampling)", sampling, or_none(is_valid), "SamplingParams(temperature=…) or None"
        )
        require(f"{type(self).__name__}(max_turn_tokens)", max_turn_tokens, is_int(1), "a positive int")
        if model.config.is_encoder_decoder:
            raise ConfigError(f"PolicyAgent requires a decoder-only model, got {type(model).__name__}")
        tokenizer, name = tokenizer_in(tokenizer), f"{type(self).__name__}(tokenizer)"
        require(name, tokenizer, lambda value: hasattr(value, "get_vocab"), "the model's tokenizer")
        self.model, self.tokenizer = model, tokenizer
        self.sampling = sampling or SamplingParams()
        self.max_turn_tokens = max_turn_tokens
        self.stop_token_ids = stop_token_ids(model, tokenizer)
        self._context, self.context_length = context, num_positions(model)
        self._forward: Callable[..., Any] = model  # a subclass may wrap it
        self._sampler = Sampler(self.sampling, shared_vocabulary_size(model, tokenizer))
        self._stop_text = StopText(self.sampling.stop, lambda ids: str(tokenizer.decode(list(ids))))  # pyright: ignore[reportUnknownMemberType]
        self._prefixes: WeakSet[CachedPrefix] = WeakSet()
        self._weights: list[tuple[int, int]] = []
        self._step: int | None = None  # optimizer step of the weights, once a trainer has set it
        self.reseed(seed)

    def prepare(self, start: BatchStart) -> None:
        """Seed the sessions of a generation batch."""
        self._step = start.step
        self.reseed(*start.seed_parts, first=start.first_session, sessions=start.session_ids)

    def weights_changed(self) -> None:
        """Do nothing: the agent samples from the model itself, and every call checks whether the caches are valid."""

    def reseed(self, *parts: object, first: int = 0, sessions: Sequence[str] = ()) -> None:
        """Seed the conversations that begin from now on, from ``parts`` and the number of their session.

        A second conversation of a session has the same number but different draws.

        Args:
            parts: JSON values.
            first: The number of the next new session. Processes that share the sessions of one batch pass the number
                of sessions before their own, so that they draw as one process would.
            sessions: Ids in the order of their numbers; other sessions are numbered after these, as they appear.
        """
        self._seed_parts, self._next_number = parts, first + len(sessions)
        self._started = {session: (number, 0) for number, session in enumerate(sessions, first)}

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Sample one turn of every session whose prompt fits into the model's positions.

        Raises:
            ConfigError: A request has no token ids, or the model cannot be sampled.
        """
        if not requests:
            return []
        if not all(request.token_ids for request in requests):
            raise ConfigError("PolicyAgent requires an environment with a tokenizer: it works on token ids, not text")
        limit_name = f"the maximum sequence length of {type(self.model).__name__}"
        answers: list[Any] = []  # a limit in tokens until the answer is sampled, or an error
        for request in requests:
            room = self.max_turn_tokens if request.max_new_tokens is None else request.max_new_tokens
            try:
                answers.append(budget_within(self.context_length, request.token_ids, room, limit_name))
            except AgentError as refusal:
                answers.append(refusal)
        fitting = {index: limit for index, limit in enumerate(answers) if isinstance(limit, int)}
        if fitting:
            actions = self._sample([requests[index] for index in fitting], [*fitting.values()])
            for index, action in zip(fitting, actions, strict=True):
                answers[index] = action
        return answers

    def _sample(self, requests: Sequence[TurnRequest], limits: Sequence[int]) -> list[Action]:
        """Sample one answer per request, up to its limit; after an error, the next call draws the same."""
        number, started = self._next_number, dict(self._started)
        states = list(map(self._state, requests, limits))
        prompts = [request.token_ids for request in requests]
        try:
            with self._inference():
                weights = self._versions()
                if self._weights != weights:
                    self._forget()
                strategy = select_strategy(self.model, self._forward)
                for decoder in strategy([state.prefix for state in states], prompts):
                    self._sample_from(decoder, states, prompts)
                self._weights = self._versions() if self._moves_weights else weights
        except BaseException:
            self._forget()  # a failed forward pass may have written part of the cache
            self._next_number, self._started = number, started
            raise
        actions: list[Action] = []
        for state in states:
            ids = state.sampled
            del state.uniforms[: len(ids)]
            is_ended = state.stopped and ids[-1] in self.stop_token_ids
            text = str(self.tokenizer.decode(ids[:-1] if is_ended else ids, skip_special_tokens=True))  # pyright: ignore[reportUnknownMemberType]
            actions.append(
                Action(
                    text=self._stop_text.before(text),
                    token_ids=ids,
                    logprobs=state.logprobs,
                    agent_state=state,
                    finish_reason="stop" if state.stopped else "length",
                    policy_version=self._step,
                )
            )
        return actions

    def finish(self) -> None:
        """Drop the caches of the sessions, which have ended."""
        self._forget()
        self._started.clear()

    def _forget(self) -> None:
        for prefix in self._prefixes:
            prefix.drop()

    def _state(self, request: TurnRequest, limit: int) -> _SamplingState:
        state = request.agent_state
        if not isinstance(state, _SamplingState) or state.prefix not in self._prefixes:
            if request.seed is not None:
                parts = ("conversation", request.seed)
            else:
                number, count = self._started.get(request.session_id, (self._next_number, 0))
                self._next_number = max(self._next_number, number + 1)
                self._started[request.session_id] = number, count + 1
                parts = (number, count) if count else (number,)
            state = _SamplingState(random.Random(derive_seed("policy", *self._seed_parts, *parts)))
        self._prefixes.add(state.prefix)
        state.sampled, state.logprobs, state.limit, state.stopped = [], [], limit, False
        return state

    @contextlib.contextmanager
    def _inference(self) -> Generator[None]:
        # In training mode, gradient checkpointing would silently leave the cache empty, and dropout would sample from a
        # different policy.
        with evaluation_mode(self.model), torch.no_grad(), self._context():
            yield

    def _versions(self) -> list[tuple[int, int]]:
        """Return pairs that change when a parameter is written to or moves in memory."""
        return [(one.data_ptr(), 0 if one.is_inference() else one._version) for one in self.model.parameters()]

    def _sample_from(self, decoder: Decoder, states: list[_SamplingState], prompts: list[Sequence[int]]) -> None:
        logits = decoder.prefill()
        seen = None if self._sampler.penalty == 1.0 else seen_tokens(prompts, logits)
        for uniforms in _uniforms(decoder, states, logits.device):
            tokens, logprobs = self._sampler.draw(logits, uniforms, None if seen is None else seen[decoder.indices])
            live = [states[index] for index in decoder.indices]
            fed: dict[int, int] = {}
            for index, one, token, logprob in zip(decoder.indices, live, tokens, logprobs, strict=True):
                if one.is_open:
                    one.sampled.append(token)
                    one.logprobs.append(logprob)
                    one.stopped = token in self.stop_token_ids or self._stop_text.completed_by_last(one.sampled)
                    if one.is_open:
                        fed[index] = token
            if not fed:
                return
            if seen is not None:
                seen[list(fed), list(fed.values())] = True
            logits = decoder.extend(fed)


def _uniforms(decoder: Decoder, states: list[_SamplingState], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the random number of each row, float64, (N,), for one token after another; they are moved in blocks."""
    place = 0
    while True:
        indices = decoder.indices
        drawn = [states[index].uniforms_of(place, place + _TOKENS_AHEAD) for index in indices]
        for column in torch.tensor(drawn, dtype=torch.float64, device=device).unbind(1):
            if decoder.indices is not indices:  # other rows now
                break
            yield column
            place += 1


class CopiedPolicyAgent(PolicyAgent):
    """A :class:`PolicyAgent` that samples from a copy of the model, whose weights are updated between turns.

    It is meant for asynchronous training (``max_staleness``) without vLLM, on a second device or with small models.
    Every turn, including its history, is computed by one version of the weights.
    """

    logprobs_match_trained_weights = False
    samples_during_updates = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: str | torch.device | None = None,
        **settings: Any,
    ) -> None:
        """Copy the model; nothing is run.

        Args:
            model: The model to be trained: the same object that is passed to the trainer.
            tokenizer: The model's tokenizer.
            device: The copy's device; None for the device of the model.
            **settings: See :class:`PolicyAgent`.
        """
        check_is_model(model, "CopiedPolicyAgent(model, tokenizer)")
        copied = copy.deepcopy(model).requires_grad_(requires_grad=False).eval()
        super().__init__(copied if device is None else copied.to(device), tokenizer, **settings)  # pyright: ignore[reportArgumentType, reportUnknownMemberType]  # torch's `to`
        self._trained, self._copied_step = model, -1
        self._lock = threading.Lock()

    def prepare(self, start: BatchStart) -> None:
        """Copy the weights if they have changed, once no turn is being sampled.

        Raises:
            ConfigError: The trained model's parameters differ in number or shape from the copy's, for example after
                adapters were added or the weights were sharded.
        """
        with self._lock:
            super().prepare(start)
            if start.step == self._copied_step:
                return
            copies, originals = ([*model.parameters(), *model.buffers()] for model in (self.model, self._trained))
            is_sharded = any(hasattr(tensor, "full_tensor") for tensor in originals)
            if is_sharded or [tensor.shape for tensor in copies] != [tensor.shape for tensor in originals]:
                raise ConfigError(
                    "CopiedPolicyAgent cannot copy the weights: parameters were added, reshaped or sharded after the "
                    "model was passed. With adapters, pass the PeftModel itself to agent and trainer, without "
                    "peft_config; with sharded weights, sample with a vLLM server"
                )
            with torch.no_grad():
                for copied, original in zip(copies, originals, strict=True):
                    copied.copy_(original)
            self._copied_step = start.step

    def weights_changed(self) -> None:
        """Copy the weights at the next :meth:`prepare`, even if its step has not changed."""
        self._copied_step = -1

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Sample one turn of every session; can be called from any thread."""
        with self._lock:
            return super().act(requests)
