"""A KV cache for batches of conversations, with rows that can be truncated, moved and batched, and grow in place.

::

    column    0 1 2 3 4 5 6 7
    row 0     a b c d e f g h      all rows end at the same column and have no holes: then every attention mask of
    row 1     . . . i j k l m      transformers is right, including those that count columns (sliding windows, chunks,
    row 2     . . . . . . n o      ALiBi)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from agentsgym.versions import empty_layers

_SPARE_COLUMNS = 64
_EMPTY_LAYERS = empty_layers()


class Place(NamedTuple):
    """The place where a conversation is cached: columns ``[start, start + length)`` of a row."""

    rows: CachedRows
    row: int
    start: int
    length: int


class Copy:
    """Copies conversations out of one cache, in one operation per buffer.

    Attributes:
        targets: The new row of each, (N,); None if they are all rows, in order.
        rows: The row of each in the cache, (N,).
    """

    def __init__(self, targets: Sequence[int] | None, places: Sequence[Place], num_columns: int, device: Any) -> None:
        self.targets = None if targets is None else torch.tensor(targets, device=device)
        self.rows = torch.tensor([place.row for place in places], device=device)
        self._firsts = torch.tensor([place.start + place.length - num_columns for place in places], device=device)
        self._lines: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, buffer: torch.Tensor, capacity: int) -> torch.Tensor:
        """Return the conversations' columns of a buffer, (R, H, C, D), as (N, H, ``capacity``, D).

        Columns outside a place have any finite content.
        """
        _, heads, old, size = buffer.shape
        lines = self._lines.get((heads, old, capacity))
        if lines is None:  # the same for most layers
            rows = self.rows[:, None] * heads + torch.arange(heads, device=buffer.device)
            columns = (torch.arange(capacity, device=buffer.device) + self._firsts[:, None]).clamp(0, old - 1)
            lines = self._lines[heads, old, capacity] = (rows[..., None] * old + columns[:, None]).flatten()
        return buffer.flatten(0, 2).index_select(0, lines).view(len(self.rows), heads, capacity, size)

    def put(self, copied: torch.Tensor, num_rows: int, into: torch.Tensor | None) -> torch.Tensor:
        """Put copies into their rows of a tensor, or of a new one with ``num_rows``."""
        if self.targets is None:
            return copied
        into = copied.new_zeros(num_rows, *copied.shape[1:]) if into is None else into
        return into.index_copy_(0, self.targets, copied)


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, written in place into buffers that double when they are full.

    All columns are kept, even with a sliding window, so that a rewritten conversation can be truncated anywhere.
    Attention receives only the window.
    """

    def __init__(self, sliding_window: int | None = None) -> None:
        DynamicLayer.__init__(self)
        self.is_sliding = sliding_window is not None
        self.sliding_window = sliding_window
        self.num_columns = 0
        self.keys: Any = None  # (N, H, C, D) with C >= num_columns
        self.values: Any = None

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append columns, (N, H, Q, D), and return the columns that the new queries may attend to, (N, H, S, D)."""
        count = key_states.shape[2]
        start, stop = self.num_columns, self.num_columns + count
        self._reserve(key_states, value_states, key_states.shape[0], stop)
        self.keys[:, :, start:stop] = key_states
        self.values[:, :, start:stop] = value_states
        _, first = self.get_mask_sizes(count)
        self.num_columns = stop
        return self.keys[:, :, first:stop], self.values[:, :, first:stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns that the new queries may attend to, and the first of them."""
        length = self.num_columns + query_length
        visible = length if self.sliding_window is None else min(length, self.sliding_window - 1 + query_length)
        return visible, length - visible

    def get_seq_length(self) -> int:
        """Return the number of columns that have been written."""
        return self.num_columns

    def take(self, sources: Sequence[tuple[GrowingLayer, Copy]], num_rows: int, num_columns: int) -> None:
        """Fill a new layer of ``num_rows`` with copies from others, so that all end at column ``num_columns``."""
        capacity = num_columns + _SPARE_COLUMNS
        for layer, copy in sources:
            if layer.is_initialized:  # some models leave a layer's cache unused
                self.keys = copy.put(copy(layer.keys, capacity), num_rows, self.keys)
                self.values = copy.put(copy(layer.values, capacity), num_rows, self.values)
                self.is_initialized = True
        self.num_columns = num_columns

    def shift(self, copy: Copy | None, num_columns: int) -> None:
        """Move all rows, so that they end at column ``num_columns``; with None, they do."""
        if self.is_initialized and copy is not None:
            self.keys, self.values = (copy(one, one.shape[2]) for one in (self.keys, self.values))
        self.num_columns = num_columns

    def _reserve(self, keys: torch.Tensor, values: torch.Tensor, num_rows: int, num_columns: int) -> None:
        old_keys, old_values, written = self.keys, self.values, self.num_columns
        if old_keys is not None and num_columns <= old_keys.shape[2]:
            return
        capacity = max(num_columns + _SPARE_COLUMNS, 2 * written)
        # Zeros, since masked values are multiplied by 0 and must be finite.
        self.keys = keys.new_zeros(num_rows, keys.shape[1], capacity, keys.shape[3])
        self.values = values.new_zeros(num_rows, values.shape[1], capacity, values.shape[3])
        if old_keys is not None:
            self.keys[:, :, :written] = old_keys[:, :, :written]
            self.values[:, :, :written] = old_values[:, :, :written]
        self.is_initialized = True


class GrowingHybridLayer(GrowingLayer, LinearAttentionAndFullAttentionLayer):
    """A layer with recurrent states in addition to keys and values."""

    def __init__(self, number_of_states: int, sliding_window: int | None = None) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states=number_of_states)
        GrowingLayer.__init__(self, sliding_window)


class GrowingIndexedLayer(GrowingLayer):
    """A layer of sparse attention, with the keys by which an indexer selects columns, and in some models positions."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = GrowingLayer(), GrowingLayer()  # without values

    def update_indexer(self, indexer_key_states: Any) -> Any:
        """Append the keys of new columns, (N, Q, D), and return those of all columns, (N, C, D)."""
        keys = indexer_key_states[:, None]
        return self.parts[0].update(keys, keys[..., :0])[0][:, 0]

    @property
    def indexer_position_ids(self) -> Any:
        """The positions of all columns, (P, N, C); None if there are none."""
        part = self.parts[1]
        return None if part.keys is None else part.keys[:, :, : part.num_columns, 0].transpose(0, 1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Any) -> None:
        new = positions.transpose(0, 1)[:, :, self.parts[1].num_columns :, None]
        self.parts[1].update(new, new[..., :0])


def growing_layer(layer: Any) -> Any:
    """Make the replacement for a layer of transformers' dynamic cache."""
    kind, window = type(layer), getattr(layer, "sliding_window", None)
    if kind in (DynamicLayer, DynamicSlidingWindowLayer):
        return GrowingLayer(window)
    if kind is DynamicIndexedLayer:
        return GrowingIndexedLayer()
    if kind in (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer):
        return GrowingHybridLayer(layer.number_of_states, window)
    if kind is LinearAttentionLayer or kind in _EMPTY_LAYERS:
        return layer
    raise NotImplementedError(
        f"conversations cannot be batched in a cache with layers of type {kind.__name__}, which are not supported"
    )


def is_recurrent(layer: Any) -> bool:
    """Whether a layer has states that each token overwrites: they cannot be truncated, and padding corrupts them."""
    return isinstance(layer, LinearAttentionLayer)


def _parts(cache: Any) -> list[Any]:
    return [part for layer in cache.layers for part in (layer, *getattr(layer, "parts", ()))]


class CachedRows:
    """The cache of some conversations, one row each."""

    def __init__(self, new_cache: Callable[[], Cache], places: Sequence[Place | None], device: torch.device) -> None:
        """Align conversations: copy their places into a new cache; None is an empty conversation."""
        self.cache = new_cache()
        self._device = device
        rows: dict[CachedRows, list[int]] = {}
        for row, place in enumerate(places):
            if place:
                rows.setdefault(place.rows, []).append(row)
        lengths = [place.length if place else 0 for place in places]
        self.num_columns = max(lengths)
        copies: list[tuple[Any, Copy]] = []
        for source, targets in rows.items():
            taken = [place for place in places if place and place.rows is source]
            is_whole = len(taken) == len(places)
            copies.append((_parts(source.cache), Copy(None if is_whole else targets, taken, self.num_columns, device)))
        for number, layer in enumerate(_parts(self.cache)):
            sources: list[Any] = [(parts[number], copy) for parts, copy in copies]
            if isinstance(layer, GrowingLayer):
                layer.take(sources, len(places), self.num_columns)
            if is_recurrent(layer) and all(lengths):
                _take_states(layer, sources, len(places))
        self._set_starts([self.num_columns - length for length in lengths])

    def shift(self, places: Sequence[Place]) -> None:
        """Realign the conversations within this cache, given the place of each, in row order."""
        self.num_columns = max(place.length for place in places)
        starts = [self.num_columns - place.length for place in places]
        copy = None
        if starts != [place.start for place in places]:
            copy = Copy(None, places, self.num_columns, self._device)
        for layer in _parts(self.cache):
            if isinstance(layer, GrowingLayer):
                layer.shift(copy, self.num_columns)
        self._set_starts(starts)

    def append(self, width: int, padding: Sequence[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``width`` columns, of which the first ``padding`` are padding (only in rows that were empty).

        Returns:
            The mask over all columns, bool, (N, S), and the positions of the new columns, (N, width).
        """
        if padding is not None and any(padding):
            self._set_starts([start + count for start, count in zip(self.starts, padding, strict=True)])
        columns = self.num_columns + width
        if self._mask is None or self._mask.shape[1] < columns:
            self._firsts = torch.tensor(self.starts, device=self._device)[:, None]
            self._columns = torch.arange(2 * columns, device=self._device)
            self._mask = self._columns >= self._firsts
        positions = (self._columns[self.num_columns : columns] - self._firsts).clamp(min=0)
        self.num_columns = columns
        return self._mask[:, :columns], positions

    def _set_starts(self, starts: list[int]) -> None:
        self.starts = starts
        self._mask: torch.Tensor | None = None
        self._firsts = self._columns = torch.zeros(0, 1, dtype=torch.long)


def _take_states(layer: Any, sources: Sequence[tuple[Any, Copy]], num_rows: int) -> None:
    source, _ = sources[0]
    for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
        setattr(layer, name, dict(getattr(source, name)))
    layer.conv_kernel_size, layer.device, layer.dtype = dict(source.conv_kernel_size), source.device, source.dtype
    for name in ("conv_states", "recurrent_states"):
        for state in range(source.number_of_states):
            if getattr(source, name)[state] is not None:
                states = None
                for one, copy in sources:
                    states = copy.put(getattr(one, name)[state].index_select(0, copy.rows), num_rows, states)
                getattr(layer, name)[state] = states
