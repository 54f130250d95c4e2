"""Play the policy in training as an agent: batched sampling on transformers, the cache kept across turns."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentsgym.agents.answers import stop_token_ids
from agentsgym.agents.base import Agent
from agentsgym.agents.eval_mode import evaluation_mode
from agentsgym.agents.policy.context_length import budget_within, num_positions
from agentsgym.agents.policy.decoding import CachedPrefix, Decoder
from agentsgym.agents.policy.decoding_strategy import select_strategy
from agentsgym.agents.policy.sampling import Sampler, SamplingParams, StopText, seen_tokens
from agentsgym.agents.policy.vocabulary import check_is_model, shared_vocabulary_size
from agentsgym.agents.trained import DEFAULT_TURN_TOKENS, BatchStart, TrainedPolicy
from agentsgym.errors import AgentError, ConfigError
from agentsgym.seeding import derive_seed
from agentsgym.types import Action, TurnRequest

__all__ = ["PolicyAgent", "SamplingParams"]


@dataclass(eq=False, slots=True)
class _SamplingState:
    """State of one conversation: its own generator, what of it is cached, and what is sampled in this turn."""

    rng: random.Random
    prefix: CachedPrefix = field(default_factory=CachedPrefix)
    sampled: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    limit: int = 0
    stopped: bool = False

    def begin(self, limit: int) -> None:
        self.sampled, self.logprobs, self.limit, self.stopped = [], [], limit, False

    @property
    def is_open(self) -> bool:
        return not self.stopped and len(self.sampled) < self.limit


class PolicyAgent(Agent, TrainedPolicy):
    """Samples a causal language model for all live episodes at once, token ids in and token ids out.

    Each turn costs one prefill of the new observation and one forward pass a token: history stays in the cache as
    long as its prompt continues it; a prompt that was rewritten is run from where it differs. Weights that changed
    since the last turn make everything be run again. A model whose cache cannot be kept is prefilled at each turn,
    with a warning; a model that cannot be sampled exactly raises ``ConfigError`` at the first turn.

    A prompt that fills the model's positions (``max_position_embeddings``) fails its own session; an answer ends where
    they do.

    Each conversation draws from its own generator, so that its answers depend neither on which others are live
    nor on their order in a batch, rounding aside; the seed of a request, where it brings one, decides them with the
    agent's. The log-probabilities are those of the sampling distribution at ``temperature``, before ``top_k``,
    ``top_p``, ``min_p`` or the repetition penalty cut anything.

    Rows of the embedding beyond the tokenizer's ids (Qwen3 has 267 of them) are never sampled, and the
    log-probabilities are those of the distribution without them. A softmax over all rows, as the loss computes it,
    returns ones that are lower by ``-log(1 - p)``, with ``p`` the probability of those rows together: next to nothing
    for a trained model, and part of what :func:`agentsgym.training.drift.logprob_gap` measures.
    """

    logprobs_are_of_trained_weights = True

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
            tokenizer: Its tokenizer.
            sampling: How tokens are drawn; temperature 1 and no cuts by default.
            seed: Seed of this agent's own draws; torch's global generator is neither read nor changed.
            max_turn_tokens: The budget of a turn for which the request sets none.
            context: Entered around the forward passes of each turn (autocast, for example).

        Raises:
            ConfigError: The first argument is not a model, the model is not a decoder-only model, or it has fewer rows
                than the tokenizer has ids.
            TemplateError: The chat template does not allow exact tokens.
        """
        check_is_model(model, f"{type(self).__name__}(model, tokenizer)")
        if model.config.is_encoder_decoder:
            raise ConfigError(f"PolicyAgent needs a decoder-only model, got {type(model).__name__}")
        self.model, self.tokenizer = model, tokenizer
        self.sampling = sampling or SamplingParams()
        self.max_turn_tokens = max_turn_tokens
        self.stop_token_ids = stop_token_ids(model, tokenizer)
        self._context, self._positions = context, num_positions(model)
        self._forward: Callable[..., Any] = model  # what is called; a subclass may put something around it
        self._sampler = Sampler(self.sampling, shared_vocabulary_size(model, tokenizer))
        self._stop_text = StopText(self.sampling.stop, lambda ids: str(tokenizer.decode(list(ids))))
        self._prefixes: WeakSet[CachedPrefix] = WeakSet()
        self._weights: list[tuple[int, int]] = []
        self._step: int | None = None  # optimizer steps behind the weights, once a trainer has set it
        self.reseed(seed)

    def prepare(self, start: BatchStart) -> None:
        """Give the sessions of a generation batch their draws."""
        self._step = start.step
        self.reseed(*start.seed_parts, first=start.first_session, sessions=start.session_ids)

    def weights_changed(self) -> None:
        """Do nothing: the weights that are sampled are the model's own, and caches are checked at every call."""

    def reseed(self, *parts: object, first: int = 0, sessions: Sequence[str] = ()) -> None:
        """Give conversations that begin from now on draws derived from ``parts`` and the number of their session.

        A session that begins a second conversation continues to draw, and keeps its own number.

        Args:
            parts: JSON values.
            first: The number of the next new session; the ones after it count on. Processes that share the sessions
                of one batch pass how many stand before their own, and draw as one process would.
            sessions: Ids in the order of their numbers; the sessions that are not among them are numbered after
                these, as they come.
        """
        self._seed_parts, self._next_number = parts, first + len(sessions)
        self._started = {session: (number, 0) for number, session in enumerate(sessions, first)}

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Sample one turn of every session whose prompt the model has positions for.

        Raises:
            ConfigError: A request comes without token ids, or the model cannot be sampled.
        """
        if not requests:
            return []
        if not all(request.token_ids for request in requests):
            raise ConfigError("a PolicyAgent needs an environment with a tokenizer: it reads token ids, not text")
        limits = [self._limit(request) for request in requests]
        fitting = [(request, limit) for request, limit in zip(requests, limits, strict=True) if isinstance(limit, int)]
        actions = iter(self._act(fitting) if fitting else ())
        return [next(actions) if isinstance(limit, int) else limit for limit in limits]

    def _limit(self, request: TurnRequest) -> int | AgentError:
        """The maximum tokens of an answer, or the error if there is no room."""
        room = self.max_turn_tokens if request.max_new_tokens is None else request.max_new_tokens
        try:
            return budget_within(
                self._positions, request.token_ids, room, f"the positions of {type(self.model).__name__}"
            )
        except AgentError as refusal:
            return refusal

    def _act(self, limited: Sequence[tuple[TurnRequest, int]]) -> list[Action]:
        requests = [request for request, _ in limited]
        number, started = self._next_number, dict(self._started)
        states = [self._state(request, limit) for request, limit in limited]
        draws = [state.rng.getstate() for state in states]
        try:
            with self._inference():
                self._sample(states, requests)
        except BaseException:
            self._forget()  # a forward pass that broke may have left the cache half written
            self._next_number, self._started = number, started  # called again, it draws the same
            for state, drawn in zip(states, draws, strict=True):
                state.rng.setstate(drawn)
            raise
        return [self._action(state) for state in states]

    def finish(self) -> None:
        """Drop the caches; the sessions are over."""
        self._forget()
        self._started.clear()

    def _forget(self) -> None:
        for prefix in self._prefixes:
            prefix.drop()

    def _state(self, request: TurnRequest, limit: int) -> _SamplingState:
        state = request.agent_state
        if not isinstance(state, _SamplingState) or state.prefix not in self._prefixes:
            state = _SamplingState(self._new_rng(request.session_id, request.seed))
        self._prefixes.add(state.prefix)
        state.begin(limit)
        return state

    def _new_rng(self, session_id: str, seed: int | None) -> random.Random:
        if seed is not None:
            return random.Random(derive_seed("policy", *self._seed_parts, "conversation", seed))
        number, count = self._started.get(session_id, (self._next_number, 0))
        self._next_number = max(self._next_number, number + 1)
        self._started[session_id] = number, count + 1
        return random.Random(derive_seed("policy", *self._seed_parts, number, *([count] if count else [])))

    @contextlib.contextmanager
    def _inference(self) -> Generator[None]:
        # In training mode, gradient checkpointing would leave the cache empty without a word, and dropout would sample
        # from another policy than the one that is trained.
        with evaluation_mode(self.model), torch.no_grad(), self._context():
            yield

    def _sample(self, states: list[_SamplingState], requests: Sequence[TurnRequest]) -> None:
        if self._weights != self._versions():
            self._forget()
        strategy = select_strategy(self.model, self._forward)
        prompts = [request.token_ids for request in requests]
        for decoder in strategy([state.prefix for state in states], prompts):
            self._sample_from(decoder, states, prompts)
        self._weights = self._versions()  # taken last, since a sharded model may leave some weights gathered

    def _versions(self) -> list[tuple[int, int]]:
        """Pairs that change when a parameter is written to or given other memory."""
        return [(one.data_ptr(), 0 if one.is_inference() else one._version) for one in self.model.parameters()]

    def _sample_from(self, decoder: Decoder, states: list[_SamplingState], prompts: list[Sequence[int]]) -> None:
        logits = decoder.prefill()
        seen = seen_tokens(prompts, logits) if self._sampler.needs_contexts else None
        while True:
            live = [states[index] for index in decoder.indices]
            uniforms = [one.rng.random() if one.is_open else 0.0 for one in live]
            tokens, logprobs = self._sampler.draw(logits, uniforms, None if seen is None else seen[decoder.indices])
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

    def _action(self, state: _SamplingState) -> Action:
        ids = state.sampled
        ended = state.stopped and ids[-1] in self.stop_token_ids
        text = str(self.tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=True))
        return Action(
            text=self._stop_text.before(text),
            token_ids=ids,
            logprobs=state.logprobs,
            agent_state=state,
            finish_reason="stop" if state.stopped else "length",
            policy_version=self._step,
        )
