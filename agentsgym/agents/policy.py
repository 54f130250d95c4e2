"""The policy in training as an agent: batched sampling on transformers, the key/value cache kept across turns."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

from agentsgym.agents.base import Agent
from agentsgym.agents.stopping import stop_token_ids
from agentsgym.errors import ConfigError
from agentsgym.seeding import derive_seed
from agentsgym.types import Action, TurnRequest

logger = logging.getLogger(__name__)
DEFAULT_TURN_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; the fields mean what they mean in transformers and TRL.

    Attributes:
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Draw among the k likeliest tokens; 0 for all.
        top_p: Draw among the likeliest tokens that hold this much probability.
        min_p: Draw among tokens at least this share as likely as the likeliest; None for all.
        repetition_penalty: Above 1, tokens that the context holds become less likely.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature must be a non-negative number, got {self.temperature!r}")

    def processors(self) -> LogitsProcessorList:
        """What cuts the distribution, in TRL's order, after the temperature."""
        processors = LogitsProcessorList()
        if self.top_k:
            processors.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            processors.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            processors.append(MinPLogitsWarper(self.min_p))
        return processors


@dataclass(eq=False, slots=True)
class _Row:
    """One conversation: what is sampled in this turn, and how much of it the cache holds."""

    num_cached: int = 0
    sampled: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    limit: int = 0
    stopped: bool = False

    def begin(self, limit: int) -> None:
        self.sampled, self.logprobs, self.limit, self.stopped = [], [], limit, False

    @property
    def is_open(self) -> bool:
        return not self.stopped and len(self.sampled) < self.limit


class _RowCache:
    """The keys and values of many conversations, one row each, with a mask over the columns that a row really has.

    Rows grow at different speeds, so a row has holes where others went on; ``squeeze`` closes them when they are more
    than the rest.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.rows: list[_Row] = []
        self.layers: Any = DynamicCache(config=model.config)
        self.mask = torch.zeros(0, 0, dtype=torch.long, device=model.device)  # (N, S)

    @property
    def can_be_kept(self) -> bool:
        """Whether every layer is plain attention over all columns, so that rows and columns can be moved about."""
        return all(type(layer) is DynamicLayer for layer in self.layers.layers)

    def arrange(self, rows: list[_Row]) -> None:
        """Make ``rows`` the rows, in that order; those that are not in the cache start empty."""
        if rows != self.rows:
            self._rearrange(rows)
        self.squeeze()

    def _rearrange(self, rows: list[_Row]) -> None:
        places = {id(row): index for index, row in enumerate(self.rows)}
        width, device = self.mask.shape[1], self.mask.device
        for row in rows:
            row.num_cached = row.num_cached if id(row) in places else 0
        # An empty row may take any row's keys: its mask hides them all.
        index = torch.tensor([places.get(id(row), 0) for row in rows], device=device)
        if self.rows:
            held = torch.tensor([[id(row) in places] for row in rows], device=device)
            self.mask = self.mask[index] * held
            self._gather(lambda tensor: tensor[index])
        else:
            self.mask = torch.zeros(len(rows), width, dtype=torch.long, device=device)
        self.rows = rows

    def squeeze(self) -> None:
        """Close the holes once they are more than half of the cache."""
        longest = int(self.mask.sum(1).max()) if self.mask.numel() else 0
        if self.mask.shape[1] <= 2 * longest:
            return
        order = self.mask.argsort(dim=1, stable=True)[:, self.mask.shape[1] - longest :]  # (N, longest), holes first
        self.mask = self.mask.gather(1, order)
        self._gather(
            lambda tensor: tensor.gather(2, order[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3]))
        )

    def _gather(self, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for layer in self.layers.layers:
            if layer.is_initialized:
                layer.keys, layer.values = move(layer.keys), move(layer.values)


class PolicyAgent(Agent):
    """Samples a causal language model for all live episodes at once, token ids in and token ids out.

    Each turn costs one prefill of the new observation and one forward pass a token: history stays in the key/value
    cache as long as the driver goes on asking. A model whose cache cannot be rearranged (sliding windows, state
    spaces) is prefilled again at each turn, with a word in the log.

    The log-probabilities are those of the sampling distribution at ``temperature``, before ``top_k``, ``top_p``,
    ``min_p`` or the repetition penalty cut anything.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        sampling: Sampling | None = None,
        seed: int = 0,
        max_turn_tokens: int = DEFAULT_TURN_TOKENS,
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """Set up sampling; nothing is run.

        Args:
            model: A causal language model.
            tokenizer: Its tokenizer.
            sampling: How tokens are drawn; temperature 1 and no cuts by default.
            seed: Of this agent's own generator; torch's global one is neither read nor changed.
            max_turn_tokens: The budget of a turn for which the request sets none.
            context: Entered around the forward passes of each turn (autocast, for example).
        """
        if model.config.is_encoder_decoder:
            raise ConfigError(f"PolicyAgent needs a decoder-only model, got {type(model).__name__}")
        self.model, self.tokenizer = model, tokenizer
        self.sampling = sampling or Sampling()
        self.max_turn_tokens = max_turn_tokens
        self.stop_token_ids = stop_token_ids(model, tokenizer)
        self._context = context
        self._processors: Any = self.sampling.processors()
        self._penalty: Any = RepetitionPenaltyLogitsProcessor(self.sampling.repetition_penalty)
        self._generator = torch.Generator(device=model.device)
        self._cache = _RowCache(model)
        self._keeps_cache = self._cache.can_be_kept
        if not self._keeps_cache:
            logger.warning("the cache of %s cannot be kept across turns: prefilling each turn", type(model).__name__)
        self.reseed(seed)

    def reseed(self, *parts: object) -> None:
        """Start the sampling generator afresh from a hash of ``parts``."""
        self._generator.manual_seed(derive_seed("policy", *parts))

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Sample one turn of every session."""
        if not requests:
            return []
        try:
            with self._inference():
                return self._sample(requests)
        except Exception:
            self.finish()  # a forward pass that broke may have left the cache half written
            raise

    def finish(self) -> None:
        """Drop the caches: the weights may change before the next rollout."""
        self._cache = _RowCache(self.model)

    def _sample(self, requests: Sequence[TurnRequest]) -> list[Action]:
        rows = self._begin(requests)
        logits = self._prefill(rows, requests)
        self._draw(rows, requests, logits)
        while any(row.is_open for row in rows):
            logits = self._extend(rows)
            self._draw(rows, requests, logits)
        return [self._action(row) for row in rows]

    @contextlib.contextmanager
    def _inference(self) -> Generator[None]:
        # In training mode, gradient checkpointing would leave the cache empty without a word, and dropout would sample
        # from another policy than the one that is trained.
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with torch.no_grad(), self._context():
                yield
        finally:
            for module in training:
                module.training = True

    def _begin(self, requests: Sequence[TurnRequest]) -> list[_Row]:
        rows = [request.agent_state if isinstance(request.agent_state, _Row) else _Row() for request in requests]
        if not self._keeps_cache:
            self._cache = _RowCache(self.model)
        self._cache.arrange(rows)
        for row, request in zip(rows, requests, strict=True):
            if not request.token_ids:
                raise ConfigError("a PolicyAgent needs an environment with a tokenizer: it reads token ids, not text")
            row.begin(self.max_turn_tokens if request.max_new_tokens is None else request.max_new_tokens)
        return rows

    def _prefill(self, rows: list[_Row], requests: Sequence[TurnRequest]) -> torch.Tensor:
        """Run what the cache does not hold yet, padded on the left, and return the last logits, (N, V)."""
        pieces = [request.token_ids[row.num_cached :] for row, request in zip(rows, requests, strict=True)]
        width = max(map(len, pieces))
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[pad] * (width - len(piece)) + list(piece) for piece in pieces])
        mask = torch.tensor([[0] * (width - len(piece)) + [1] * len(piece) for piece in pieces])
        return self._forward(rows, ids, mask)

    def _extend(self, rows: list[_Row]) -> torch.Tensor:
        """Run the token just drawn of each open row and return the next logits, (N, V)."""
        ids = torch.tensor([[row.sampled[-1] if row.is_open else 0] for row in rows])
        mask = torch.tensor([[int(row.is_open)] for row in rows])
        return self._forward(rows, ids, mask)

    def _forward(self, rows: list[_Row], ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        cache, device = self._cache, self._cache.mask.device
        ids, mask = ids.to(device), mask.to(device)  # (N, P)
        cached = torch.tensor([[row.num_cached] for row in rows], device=device)
        cache.mask = torch.cat([cache.mask, mask], dim=1)
        output = self.model(
            input_ids=ids,
            attention_mask=cache.mask,
            position_ids=(cached + mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=cache.layers,
            use_cache=True,
            logits_to_keep=1,
        )
        for row, count in zip(rows, mask.sum(1).tolist(), strict=True):
            row.num_cached += count
        return output.logits[:, -1]

    def _draw(self, rows: list[_Row], requests: Sequence[TurnRequest], logits: torch.Tensor) -> None:
        scores = logits.float()
        if self.sampling.temperature > 0:
            scores = scores / self.sampling.temperature
        logprobs = scores.log_softmax(-1)  # (N, V)
        if self.sampling.repetition_penalty != 1.0:
            scores = self._penalized(scores, rows, requests)
        if self.sampling.temperature == 0:
            drawn = scores.argmax(-1, keepdim=True)
        else:
            probabilities = self._processors(None, scores).softmax(-1)
            drawn = torch.multinomial(probabilities, 1, generator=self._generator)
        chosen = zip(rows, drawn[:, 0].tolist(), logprobs.gather(1, drawn)[:, 0].tolist(), strict=True)
        for row, token, logprob in chosen:
            if row.is_open:
                row.sampled.append(token)
                row.logprobs.append(logprob)
                row.stopped = token in self.stop_token_ids

    def _penalized(self, scores: torch.Tensor, rows: list[_Row], requests: Sequence[TurnRequest]) -> torch.Tensor:
        contexts = [
            torch.tensor([[*request.token_ids, *row.sampled]], device=scores.device)
            for row, request in zip(rows, requests, strict=True)
        ]
        return torch.cat([self._penalty(context, scores[i : i + 1]) for i, context in enumerate(contexts)])

    def _action(self, row: _Row) -> Action:
        said = row.sampled[:-1] if row.stopped else row.sampled
        return Action(
            text=str(self.tokenizer.decode(said, skip_special_tokens=True)),
            token_ids=row.sampled,
            logprobs=row.logprobs,
            agent_state=row,
            finish_reason="stop" if row.stopped else "length",
        )
