"""Run a causal language model token by token: many conversations in a batch, or one without batching."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from agentsgym.agents.policy.attention import grouped_attention
from agentsgym.agents.policy.kv_cache import CachedRows, GrowingLayer, Place, growing_layer, is_recurrent
from agentsgym.agents.policy.model import num_positions
from agentsgym.agents.policy.text_path import without_adapters
from agentsgym.versions import CACHE_NAMES

_CACHE_NAMES = (*CACHE_NAMES, "state", "past_buckets_states")  # with those of models that have a cache of their own
_WIDTH_WORTH_SPLITTING = 64  # columns
_LENGTH_WORTH_SHARING = 32  # tokens of a prompt; running fewer costs about as much as copying their cache


@dataclass(eq=False, slots=True, weakref_slot=True)
class CachedPrefix:
    """The cached beginning of one conversation.

    Attributes:
        rows: The cache; None if nothing is cached.
        row: The conversation's row in it.
        ids: The cached ids.
    """

    rows: CachedRows | None = None
    row: int = 0
    ids: list[int] = field(default_factory=list[int])

    def drop(self) -> None:
        """Release the cache."""
        self.rows, self.ids = None, []

    def place(self, length: int) -> Place | None:
        """Return where the first ``length`` ids are cached; None if nowhere."""
        return Place(self.rows, self.row, self.rows.starts[self.row], length) if self.rows and length else None

    def num_shared(self, prompt: Sequence[int]) -> int:
        """Count the leading ids that the cache and ``prompt`` share, excluding the prompt's last id."""
        length = min(len(self.ids), len(prompt) - 1)
        if self.rows is None or list(prompt[:length]) == self.ids[:length]:
            return length
        return next(index for index in range(length) if prompt[index] != self.ids[index])


class Forward:
    """Calls a model with the arguments that it accepts."""

    def __init__(
        self, model: PreTrainedModel, call: Callable[..., Any] | None = None, *, is_plain: bool = False
    ) -> None:
        """Set up; nothing is run.

        Args:
            model: A causal language model.
            call: What to call instead of the model, such as a wrapper; by default the model.
            is_plain: Whether ``sdpa`` may be given a mask for one new token, and :func:`extended_sdpa` replace it for
                several.
        """
        unwrapped = without_adapters(model)  # the forward method of adapters accepts any argument
        self.model, self.call, self.device, self.is_plain = model, call or model, model.device, is_plain
        self.name, limit = type(unwrapped).__name__, num_positions(model)
        self.last_position = None if limit is None else limit - 1
        self.accepted = frozenset(inspect.signature(type(unwrapped).forward).parameters)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]

    def __call__(self, ids: Sequence[Sequence[int]], **arguments: Any) -> Any:
        """Run the ids, (N, Q), and return the model's output."""
        # These serve the load-balancing loss, which transformers cannot compute if the cache is longer than the ids.
        arguments["output_router_logits"] = False
        accepted = {name: value for name, value in arguments.items() if name in self.accepted}
        is_chunk = len(ids[0]) > 1
        with (
            grouped_attention(self.model) if self.is_plain and is_chunk else contextlib.nullcontext(),
            _contiguous_head(self.model) if is_chunk else contextlib.nullcontext(),
        ):
            return self.call(input_ids=torch.tensor(ids, device=self.device), **accepted)

    def new_cache(self) -> DynamicCache:
        """Make a cache of growing layers.

        Raises:
            NotImplementedError: Some layer of the model has no supported cache.
        """
        cache = DynamicCache(config=self.model.config)
        cache.layers = [growing_layer(layer) for layer in cache.layers]
        return cache

    @property
    def cache_name(self) -> str:
        """The name of the model's argument for a cache."""
        for name in CACHE_NAMES:
            if name in self.accepted:
                return name
        raise NotImplementedError(f"{self.name} accepts no cache")


@contextlib.contextmanager
def _contiguous_head(model: Any) -> Generator[None]:
    """Pass contiguous hidden states to the head, (N, 1, H).

    The last position's slice is not contiguous. torch then multiplies row by row, and if the head is frozen, as with
    adapters, it first copies the head for every row: gigabytes for a large vocabulary.
    """
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    hook = head.register_forward_pre_hook(lambda _, inputs: tuple(one.contiguous() for one in inputs))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType, reportUnknownVariableType, reportUnknownMemberType]
    try:
        yield
    finally:
        hook.remove()


class BatchedDecoder:
    """Runs all conversations in a batch, and keeps their caches for the next turn.

    If a prompt has fewer new tokens than another, its last cached tokens are run again in place of padding, so that
    rows have no holes. Layers with recurrent states allow neither this nor padding; for them, only prompts with the
    same number of new tokens are run together.

    Attributes:
        indices: Index of the conversation in each row of the latest logits.
    """

    def __init__(
        self,
        prefixes: Sequence[CachedPrefix],
        prompts: Sequence[Sequence[int]],
        *,
        forward: Forward,
        one_by_one: bool = False,
    ) -> None:
        """Set up; nothing is run.

        Args:
            prefixes: Cached prefix of each conversation; updated in place.
            prompts: Prompt of each conversation.
            forward: The model.
            one_by_one: Whether to run new tokens after a cached state singly (some models ignore it in longer chunks).
        """
        self.forward, self.prefixes, self.prompts = forward, prefixes, prompts
        layers = forward.new_cache().layers
        self.has_states = any(is_recurrent(layer) for layer in layers)
        self.has_columns = any(isinstance(layer, GrowingLayer) for layer in layers)
        self.sees_all = all(type(layer) is GrowingLayer and not layer.is_sliding for layer in layers)
        self.one_by_one = one_by_one
        self.indices = list(range(len(prefixes)))
        self.num_shared: list[int] = []
        for prefix, prompt in zip(prefixes, prompts, strict=True):
            num_shared = prefix.num_shared(prompt)
            self.num_shared.append(0 if self.has_states and num_shared < len(prefix.ids) else num_shared)

    def prefill(self) -> torch.Tensor:
        """Run the new tokens in as few forward passes as is correct, and return the next logits, (N, V).

        Equal long prompts without a cache, as at the start of a task group, are run once.
        """
        equals: dict[Hashable, list[int]] = {}
        for index, prompt in enumerate(self.prompts):
            is_shared = not self.num_shared[index] and len(prompt) >= _LENGTH_WORTH_SHARING
            equals.setdefault(tuple(prompt) if is_shared else index, []).append(index)
        copies = {first: others for first, *others in equals.values()}
        order, logits = self._run_new_tokens(list(copies))
        if len(copies) < len(self.prompts):
            for first, others in copies.items():
                run = self.prefixes[first]
                for copy in map(self.prefixes.__getitem__, others):
                    copy.rows, copy.row, copy.ids = run.rows, run.row, list(run.ids)
            logits = logits[[row for row, first in enumerate(order) for _ in (first, *copies[first])]]
            order = [index for first in order for index in (first, *copies[first])]
        if order != self.indices:
            self._align(order)
        return logits

    def _run_new_tokens(self, indices: Sequence[int]) -> tuple[list[int], torch.Tensor]:
        """Run the new tokens of some conversations; return the order in which they ran, and their next logits."""
        logits: list[torch.Tensor] = []
        order: list[int] = []
        for group in self._groups(indices):
            width = max(len(self.prompts[index]) - self.num_shared[index] for index in group)
            if self.one_by_one and self.num_shared[group[0]]:
                logits.append(self._step_in(group, width))
            else:
                kept = [max(0, len(self.prompts[index]) - width) for index in group]
                self._align(group, kept)
                pieces = [self.prompts[index][count:] for index, count in zip(group, kept, strict=True)]
                padding = [width - len(piece) for piece in pieces]
                padded = [[0] * count + list(piece) for count, piece in zip(padding, pieces, strict=True)]
                logits.append(self._run(padded, padding))
                for index in group:
                    self.prefixes[index].ids = list(self.prompts[index])
            order += self.indices
        return order, torch.cat(logits)

    def extend(self, tokens: Mapping[int, int]) -> torch.Tensor:
        """Run one more token of each conversation in ``tokens``, close all others, and return the next logits.

        Closed conversations are dropped once they make up half of the rows, or their idle tokens reach the last
        position, on which the columns of all rows depend.
        """
        num_closed, last = len(self.indices) - len(tokens), self.forward.last_position
        is_full = last is not None and self.rows.num_columns > last
        # A closed row is fed idle tokens, which come after its content but would corrupt recurrent states.
        if num_closed and (self.has_states or num_closed >= len(tokens) or is_full):
            self._align([index for index in self.indices if index in tokens])
        logits = self._run([[tokens.get(index, 0)] for index in self.indices])
        for index, token in tokens.items():
            self.prefixes[index].ids.append(token)
        return logits

    def _groups(self, indices: Sequence[int]) -> list[list[int]]:
        """Group the conversations whose new tokens are run together."""
        widths = [len(prompt) - shared for prompt, shared in zip(self.prompts, self.num_shared, strict=True)]
        if self.has_states:
            equals: dict[tuple[bool, int], list[int]] = {}
            for index in indices:
                shared = self.num_shared[index]
                width = 0 if shared and self.one_by_one else widths[index]
                equals.setdefault((shared > 0, width), []).append(index)
            return list(equals.values())
        # Otherwise, one long new prompt would widen the rows of all short ones.
        groups: list[list[int]] = []
        for index in sorted(indices, key=widths.__getitem__):
            if groups and widths[index] <= max(_WIDTH_WORTH_SPLITTING, 4 * widths[groups[-1][0]]):
                groups[-1].append(index)
            else:
                groups.append([index])
        return [sorted(group) for group in groups]

    def _step_in(self, group: list[int], width: int) -> torch.Tensor:
        """Run the new tokens one at a time; shorter conversations join later, so that all end together."""
        active: list[int] = []
        logits = torch.empty(0)
        for num_left in range(width, 0, -1):
            joining = [i for i in group if len(self.prompts[i]) - self.num_shared[i] == num_left]
            if joining:
                active += joining
                self._align(active)
            logits = self._run([[self.prompts[index][-num_left]] for index in active])
            for index in active:
                self.prefixes[index].ids.append(self.prompts[index][-num_left])
        return logits

    def _align(self, indices: list[int], lengths: Sequence[int] | None = None) -> None:
        """Align the first ``lengths`` cached tokens (all by default) of these conversations in one cache."""
        lengths = lengths or [len(self.prefixes[index].ids) for index in indices]
        places = [self.prefixes[index].place(length) for index, length in zip(indices, lengths, strict=True)]
        rows = places[0].rows if places[0] else None
        inside = [place for place in places if place and place.rows is rows]
        if rows and [place.row for place in inside] == list(range(len(rows.starts))) and len(inside) == len(places):
            rows.shift(inside)  # they are all the rows of one cache, in order
        else:
            rows = CachedRows(self.forward.new_cache, places, self.forward.device)
        for row, index in enumerate(indices):
            self.prefixes[index].rows, self.prefixes[index].row = rows, row
        self.rows, self.indices = rows, indices

    def _run(self, ids: list[list[int]], padding: list[int] | None = None) -> torch.Tensor:
        mask, positions = self.rows.append(len(ids[0]), padding)
        arguments: dict[str, Any] = {self.forward.cache_name: self.rows.cache}
        if self.forward.is_plain and self.sees_all and len(ids[0]) == 1:  # transformers would read its mask on the host
            arguments["attention_mask"] = mask[:, None, None] if any(self.rows.starts) else None
        elif self.has_columns:
            arguments["attention_mask"] = mask.long()
        output = self.forward(ids, position_ids=positions, use_cache=True, logits_to_keep=1, **arguments)
        return output.logits[:, -1]


class SequentialDecoder:
    """Runs one conversation, without padding and with the model's own cache, if any; see :class:`BatchedDecoder`."""

    def __init__(self, index: int, prompt: Sequence[int], *, forward: Forward, with_cache: bool) -> None:
        self.indices, self.ids = [index], list(prompt)
        self.forward, self.with_cache = forward, with_cache
        self.cache: dict[str, Any] = {}

    def prefill(self) -> torch.Tensor:
        """Run the prompt, and return the next logits, (1, V)."""
        return self._run(self.ids)

    def extend(self, tokens: Mapping[int, int]) -> torch.Tensor:
        """Run one more token, or the entire conversation again if the model has no cache."""
        token = tokens[self.indices[0]]
        self.ids.append(token)
        return self._run([token] if self.cache else self.ids)

    def _run(self, ids: list[int]) -> torch.Tensor:
        positions = torch.arange(len(self.ids) - len(ids), len(self.ids), device=self.forward.device)[None]
        arguments = {"position_ids": positions, "use_cache": self.with_cache, "logits_to_keep": 1, **self.cache}
        output = self.forward([ids], **arguments)
        if self.with_cache:
            caches = {name: getattr(output, name, None) for name in _CACHE_NAMES if name in self.forward.accepted}
            self.cache = {name: cache for name, cache in caches.items() if cache is not None}
        return output.logits[:, -1]


Decoder = BatchedDecoder | SequentialDecoder  # conversations whose next tokens are sampled together
