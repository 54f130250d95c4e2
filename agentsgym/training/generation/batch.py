"""Generation batches: their purpose and number before they are played, their rollouts, and what ranks exchange."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, Literal, cast

if TYPE_CHECKING:
    from agentsgym.batch.layouts import TrainingRow
    from agentsgym.credit.scored import ScoredRollout
    from agentsgym.envs.dataset_rows import DatasetRow
    from agentsgym.training.metrics.rollouts import RolloutSummary
    from agentsgym.types import Trajectory


class PlayedEvaluation:
    """The generation batches of one evaluation: the summaries of all ranks, and this rank's trajectories.

    Attributes:
        num_rollouts: Number of rollouts on all ranks so far.
    """

    def __init__(self) -> None:
        self._batches: list[GenerationBatch] = []
        self.num_rollouts = 0

    def add(self, batch: GenerationBatch) -> None:
        """Add the next batch."""
        self._batches.append(batch)
        self.num_rollouts += len(batch.rollouts)

    def first(self, count: int | None) -> tuple[list[RolloutSummary], list[Trajectory]]:
        """Return the first ``count`` rollouts of all ranks (None: all), and this rank's trajectories among them."""
        outcomes: list[RolloutSummary] = []
        own: list[Trajectory] = []
        start = 0
        count = self.num_rollouts if count is None else count
        for batch in self._batches:
            outcomes += batch.rollouts
            own += [one for i, one in zip(batch.local_indices, batch.trajectories, strict=True) if start + i < count]
            start += len(batch.rollouts)
        return outcomes[:count], own


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The purpose and the number of a generation batch.

    Attributes:
        kind: ``"train"`` or ``"eval"``.
        index: In training, the number of the generation batch, from 1; in an evaluation, the number of rollouts played
            before it. Seeds are derived from kind and index, so that a resumed run uses the same ones.
        step: Number of optimizer steps taken so far.
        num_rollouts: Number of consecutive rows that are rollouts of one task.
        attempt: 0 for the batch itself, k for the k-th resampling of its task groups.
    """

    kind: Literal["train", "eval"]
    index: int
    step: int
    num_rollouts: int
    attempt: int = 0

    @property
    def is_training(self) -> bool:
        """Whether the batch is trained on."""
        return self.kind == "train"

    def place(self, index: int) -> tuple[int, int]:
        """Return a row's task group and its index in the group, given the row's index over all ranks.

        Task groups are numbered per batch in training, and over all batches in an evaluation.
        """
        return divmod(index if self.is_training else self.index + index, self.num_rollouts)

    @property
    def seed_parts(self) -> tuple[str | int, ...]:
        """The values from which this batch's seeds are derived, together with ``args.seed``."""
        return (self.kind, self.index, *(("again", self.attempt) if self.attempt else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBatch:
    """A generation batch that has been played.

    Attributes:
        dataset_rows: The rows of this rank's rollouts, (B,).
        trajectories: This rank's rollouts, (B,).
        training_rows: The training rows made from these rollouts.
        first: Index of this rank's first rollout in ``rollouts``.
        rollouts: The rollouts of all ranks, in rank order, (N,).
        replaced: Rollouts of all ranks that were played but replaced by resampling.
        metrics: Additional metrics of the generation.
    """

    dataset_rows: Sequence[DatasetRow]
    trajectories: Sequence[Trajectory]
    training_rows: Sequence[TrainingRow]
    first: int
    rollouts: Sequence[RolloutSummary]
    replaced: Sequence[RolloutSummary] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def local_indices(self) -> range:
        """The indices of this rank's rollouts in ``rollouts``."""
        return range(self.first, self.first + len(self.trajectories))

    @property
    def scored(self) -> list[ScoredRollout]:
        """The rollouts of all ranks, as inputs to advantage estimators, (N,)."""
        return [rollout.scored for rollout in self.rollouts]

    @property
    def max_rows(self) -> int:
        """The number of training rows on the rank that has the most."""
        size = max(1, len(self.trajectories))  # equal on all ranks
        ranks = [self.rollouts[start : start + size] for start in range(0, len(self.rollouts), size)]
        counts = [sum(rollout.num_rows for rollout in rank) for rank in ranks]
        return max(counts, default=0)


_DIGEST_BYTES: Final = 12  # a collision among a million keys has probability 10^-17
_SHORT: Final = 24  # keys with at most this many characters are sent unchanged

PackedValues = tuple["array[int]", "array[float]"]
"""The token count of each turn, and the values of all tokens or of each turn's first token, in single precision."""


def short_summaries(summaries: Sequence[RolloutSummary]) -> list[RolloutSummary]:
    """Compress the summaries of this rank's rollouts, without affecting anything that is computed from them.

    State keys are only compared with each other, for which digests suffice. If ``turn_credit`` leaves turn rewards
    unchanged, they become one list, which is sent once. Only the first error of each rank is kept.
    """
    first = next((place for place, one in enumerate(summaries) if one.error is not None), None)
    shortened: list[RolloutSummary] = []
    for place, one in enumerate(summaries):
        is_same = list(one.scored.turn_rewards) == list(one.turn_rewards)
        rewards = one.turn_rewards if is_same else one.scored.turn_rewards
        scored = replace(one.scored, turn_rewards=rewards, state_keys=[*map(short_key, one.scored.state_keys)])
        shortened.append(replace(one, scored=scored, error=one.error if place == first else None))
    return shortened


def short_key(key: Hashable) -> Hashable:
    """Return a short key unchanged, and a digest of a long one; results are equal exactly if the keys are.

    Numbers, text, bytes, and tuples and frozensets of them are digested; other keys stay unchanged.

    >>> short_key("a cellar"), short_key("a cellar " * 9) == short_key("a cellar " * 9)
    ('a cellar', True)
    """
    if key is None or (isinstance(key, str | bytes) and len(key) <= _SHORT):
        return key
    text = _text_of(key)
    if text is None or len(text) <= _SHORT:
        return key
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def _text_of(key: Hashable) -> str | None:
    """Encode a key as text, with equal texts exactly for equal keys (``1 == 1.0 == True``); None for other types."""
    value: Any = int(key) if isinstance(key, float) and key.is_integer() else key
    match value:
        case str():
            text = f"s{len(value)}:{value}"
        case bytes():
            text = f"b{value.hex()}"
        case Integral():
            text = f"n{int(value)}"
        case None | float():
            text = f"n{value!r}"
        case tuple() | frozenset():
            texts = [_text_of(one) for one in cast("Iterable[Hashable]", value)]
            known = [one for one in texts if one is not None]
            joined = f"({','.join(known)})" if isinstance(value, tuple) else f"{{{','.join(sorted(known))}}}"
            text = joined if len(known) == len(texts) else None
        case _:
            text = None
    return text


def packed_values(values: Sequence[Sequence[float]], *, first_only: bool = False) -> PackedValues:
    """Pack a value head's predictions for the tokens of a rollout's turns, (K, n_k), in single precision.

    Args:
        values: One prediction per agent token.
        first_only: Whether to keep only the prediction for the first token of each turn.

    Returns:
        The packed values, of four bytes per turn and four bytes per value.
    """
    sent = [turn[:1] for turn in values] if first_only else values
    return array("I", map(len, values)), array("f", chain.from_iterable(sent))


def unpacked_values(packed: PackedValues) -> list[list[float]]:
    """Unpack the result of :func:`packed_values`; missing values are NaN."""
    counts, values = packed
    is_complete = len(values) == sum(counts)
    places = pairwise(accumulate(counts if is_complete else (min(count, 1) for count in counts), initial=0))
    sent = [values[start:stop].tolist() for start, stop in places]
    return [turn + [math.nan] * (count - len(turn)) for turn, count in zip(sent, counts, strict=True)]
