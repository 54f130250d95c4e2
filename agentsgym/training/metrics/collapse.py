"""Recognize a policy that has stopped exploring, or that answers without reading its prompt."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Final

logger = logging.getLogger(__name__)

_NUM_BATCHES: Final = 5  # that are averaged
_NUM_COMPARISONS: Final = 3
_SMALL_ENTROPY: Final = 0.25  # of what it was
_SMALL_INFORMATION: Final = 0.1
_MIN_INFORMATION: Final = 0.3  # nats; below, the answers never depended on the prompt
_SOLVED: Final = 0.75


class CollapseWatch:
    """Compares the policy's entropy and the dependence on its prompts with their earlier values; warns once of each.

    A policy that solves more than three in four tasks may be as certain as it likes.
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=_NUM_BATCHES)
        self._information: deque[float] = deque(maxlen=_NUM_COMPARISONS)
        self._most_information = 0.0
        self._warned: set[str] = set()

    def add(self, metrics: Mapping[str, float], entropy: float | None) -> None:
        """Add a training batch.

        Args:
            metrics: The metrics of the batch.
            entropy: Mean of -log p over the sampled tokens, in nats; None if unknown.
        """
        if metrics.get("win_rate", 0.0) > _SOLVED:
            return
        if entropy is not None:
            self._check_entropy(entropy, metrics.get("frac_reward_zero_std", 0.0))
        information = metrics.get("prompt_dependence/mutual_information")
        if information is not None:
            self._check_information(information)

    def _check_entropy(self, entropy: float, num_equal: float) -> None:
        if len(self._first) < _NUM_BATCHES:
            self._first.append(entropy)
            return
        self._recent.append(entropy)
        first, now = fmean(self._first), fmean(self._recent)
        if len(self._recent) == _NUM_BATCHES and now < _SMALL_ENTROPY * first and num_equal >= 0.5:
            self._warn_once(
                "the policy hardly explores any more: the entropy of its answers is %.3f nats per token, %.3f at the "
                "start, and %.0f %% of the task groups of the last batch have equal rewards; lower learning_rate, set "
                "entropy_coef or beta, or raise temperature",
                now,
                first,
                100 * num_equal,
            )

    def _check_information(self, information: float) -> None:
        self._information.append(information)
        self._most_information = max(self._most_information, information)
        now = fmean(self._information)
        is_small = now < _SMALL_INFORMATION * self._most_information and self._most_information > _MIN_INFORMATION
        if len(self._information) == _NUM_COMPARISONS and is_small:
            self._warn_once(
                "the policy's answers hardly depend on their prompts any more: their mutual information is %.2f nats, "
                "%.2f at its highest; lower learning_rate, and set "
                "zero_variance_groups='drop', since groups with equal rewards only add the KL and entropy terms",
                now,
                self._most_information,
            )

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *values)
