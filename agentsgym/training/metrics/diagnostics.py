"""Warn about settings that do not fit the rollouts of a run, and about a policy that stopped exploring or reading.

How much the policy's answers depend on their prompts is measured as in RAGEN-2 (2604.06268): for N turns of different
tasks, each answer is scored under all N prompts. With the prompts x and the answers y::

    mutual information   mean_j [ log p(y_j | x_j) - log mean_i p(y_j | x_i) ]     in nats, at most log N
    retrieval            fraction of answers that are likelier under their own prompt than under any other

Both fall when the policy gives the same answers whatever it reads, which entropy does not show.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Final, cast

import torch

from agentsgym.credit.advantages import step_group_sizes
from agentsgym.credit.traits import reads_token_rewards, traits_of
from agentsgym.ranks import all_gather_objects
from agentsgym.training.tensors.logprobs import Score
from agentsgym.training.tensors.scoring import padded_columns

if TYPE_CHECKING:
    from agentsgym.credit.bound import BoundEstimator
    from agentsgym.credit.registry import EstimatorTraits
    from agentsgym.credit.scored import ScoredRollout
    from agentsgym.training.config import GRPOEnvConfig
    from agentsgym.types import Trajectory


logger = logging.getLogger(__name__)

_LONG_ROLLOUT: Final = 500
_MANY_FLAT_BATCHES: Final = 10
_NUM_BATCHES: Final = 5  # that are averaged
_NUM_COMPARISONS: Final = 3
_SMALL_ENTROPY: Final = 0.25  # of what it was
_SMALL_INFORMATION: Final = 0.1
_MIN_INFORMATION: Final = 0.3  # nats; below, the answers never depended on the prompt
_SOLVED: Final = 0.75


class _Warnings:
    """Logs each warning once."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *values)


class CollapseWatch(_Warnings):
    """Compares the policy's entropy and the dependence on its prompts with their earlier values; warns once of each.

    A policy that solves more than three in four tasks may be as certain as it likes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=_NUM_BATCHES)
        self._information: deque[float] = deque(maxlen=_NUM_COMPARISONS)
        self._most_information = 0.0

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


class Diagnostics(_Warnings):
    """Compares each training batch with the settings, and logs each warning once per run.

    Attributes:
        collapse: Reports a policy that has stopped exploring or reading.
    """

    def __init__(self, args: GRPOEnvConfig, estimator: BoundEstimator) -> None:
        """Set up the checks; no warning has been logged yet.

        Args:
            args: The settings.
            estimator: The estimator of the settings; it is checked only if its traits are known.
        """
        super().__init__()
        self._args = args
        self._estimator = estimator
        own = traits_of(estimator.function, estimator.options)  # without the traits that shaping adds
        self._sums_returns = own is not None and "discount" in own.uses
        self._num_flat = 0  # consecutive batches
        self.collapse = CollapseWatch()

    def check(
        self, rollouts: Sequence[ScoredRollout], num_tokens: Sequence[int] | None = None, *, is_flat: bool = False
    ) -> None:
        """Warn about the rollouts of this batch.

        Args:
            rollouts: The rollouts of all ranks, in the estimator's form; filtered rollouts are marked as dropped.
            num_tokens: The agent tokens of each rollout, if the estimator processed its roles separately.
            is_flat: Whether all advantages are zero.
        """
        # Rewards of tokens are not available here.
        is_flat = is_flat and not reads_token_rewards(self._estimator.traits)
        self._num_flat = self._num_flat + 1 if is_flat else 0
        if self._num_flat == _MANY_FLAT_BATCHES:
            self._warn_of_flat([rollout.final_reward for rollout in rollouts if not rollout.failed])
        included = [rollout for rollout in rollouts if rollout.included]
        masked = [one for one in included if self._args.truncation == "mask" and one.truncated]
        if len(masked) == len(included):
            self._warn_once("no rollout of the generation batch is left to train on: all failed or were filtered out")
        if not included:
            return
        if self._estimator.traits is not None:
            self._check_estimator(included, self._estimator.traits)
        length = fmean(num_tokens or [sum(rollout.token_counts) for rollout in rollouts])
        if length == 0:
            self._warn_once("no rollout of the generation batch has an agent token, so there is nothing to train on")
        else:
            self._warn_of_lost_rewards(included)
        if length > _LONG_ROLLOUT:
            self._check_ratios(math.floor(length))

    def warn_of_text(self, num_inexact: int, num_rollouts: int) -> None:
        """Warn about agent tokens that were tokenized from text."""
        if num_inexact:
            self._warn_once(
                "%d of %d rollouts contain text without token ids: it was tokenized here, and its tokens may differ "
                "from the sampled ones",
                num_inexact,
                num_rollouts,
            )

    def _warn_of_flat(self, rewards: Sequence[float]) -> None:
        if not rewards:
            seen = "are missing, since every rollout failed"
        elif len(set(rewards)) == 1:
            seen = f"were all {rewards[0]:g}"
        else:
            seen = f"ranged from {min(rewards):g} to {max(rewards):g}, without a difference within a task group"
        self._warn_once(
            "all advantages were zero in %d consecutive generation batches, so the policy learned nothing from them: "
            "the rewards of the last batch %s; choose tasks that the policy solves sometimes but not always, reward "
            "partial progress, warm-start the policy with imitate, or raise num_generations or temperature",
            _MANY_FLAT_BATCHES,
            seen,
        )

    def _warn_of_lost_rewards(self, rollouts: Sequence[ScoredRollout]) -> None:
        """Warn about rewards of turns without tokens, which no token bears."""
        lost = [
            reward
            for one in rollouts
            for reward, count in zip(one.turn_rewards, one.token_counts, strict=False)
            if reward != 0 and count == 0
        ]
        if lost:
            self._warn_once(
                "%d turns of a generation batch have a reward, the first of them %g, but no tokens, so no token is "
                "trained with it: the answers are empty, and the tokenizer has no chat template that ends a turn",
                len(lost),
                lost[0],
            )

    def _check_estimator(self, rollouts: Sequence[ScoredRollout], traits: EstimatorTraits) -> None:
        """Warn about properties that the estimator needs but these rollouts lack."""
        name = self._estimator.name
        keys = [key for rollout in rollouts for key in rollout.state_keys] if "state_keys" in traits.uses else []
        if keys and all(key is None for key in keys):
            self._warn_once(
                "the environment returns no state keys, so %r has no turns to compare: implement its _state_key", name
            )
        sizes = step_group_sizes(rollouts) if keys else []
        if sizes and sizes.count(1) > 0.9 * sum(sizes):
            self._warn_once(
                "more than nine in ten turns are the only ones in their state, so %r has no other turn to compare them "
                "with: _state_key is too fine for %d rollouts per task",
                name,
                cast("int", self._args.num_generations),
            )
        if traits.compares_in_task_groups and 1 in Counter(rollout.group for rollout in rollouts).values():
            self._warn_once(
                "a task group has only one usable rollout, for which %r has no baseline: set min_group_size=2 to drop "
                "such groups",
                name,
            )
        sums = [(math.fsum(one.turn_rewards), one.final_reward) for one in rollouts if one.turn_rewards]
        if self._sums_returns and not all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-6) for pair in sums):
            self._warn_once(
                "the final reward is not the sum of the turn rewards, but %r sums turn rewards: return it from "
                "_step_episode, or set env_config['turn_credit'] to 'final'",
                name,
            )
        if "discount" not in traits.uses and self._args.discount != 1:
            self._warn_once("discount=%g has no effect: %r has no sum over turns", self._args.discount, name)

    def _check_ratios(self, length: int) -> None:
        """Warn about importance ratios of rows with many agent tokens."""
        args = self._args
        lags_behind, correction = args.needs_old_logprobs, args.importance_correction
        is_of_sequence = correction is not None and correction.mode.startswith("sequence")
        if is_of_sequence or (args.loss.multiplies_row_ratios and lags_behind):
            self._warn_once(
                "the importance ratio of a row multiplies those of all its agent tokens, %d on average: small "
                "differences add up, so most rows end at a bound or at 0; use ratios of single tokens",
                length,
            )
        if args.importance_sampling_level == "sequence" and lags_behind:
            self._warn_once(
                "importance_sampling_level='sequence' clips a mean over %d agent tokens on average, which rarely "
                "exceeds bounds that suit single tokens: its authors set epsilon=3e-4 and epsilon_high=4e-4",
                length,
            )


MAX_TURNS: Final = 8
"""Number of turns that are compared, so that 64 rows are scored."""

Exchange = tuple[list[int], list[int]]
"""The token ids of a prompt and of the answer to it."""


def drawn_turns(trajectories: Sequence[Trajectory], groups: Sequence[int], seed: int) -> list[Exchange]:
    """Draw a turn from a rollout of each task group, of at most :data:`MAX_TURNS` groups.

    Args:
        trajectories: Rollouts, (B,).
        groups: The task group of each.
        seed: Random seed.
    """
    rng = random.Random(seed)
    exchanges: list[Exchange] = []
    for group in dict.fromkeys(groups):
        own = [one for one, place in zip(trajectories, groups, strict=True) if place == group and not one.failed]
        turns = [(one, turn) for one in own for turn in one.turns if turn.stop > turn.start > turn.prompt_start]
        if turns and len(exchanges) < MAX_TURNS:
            played, turn = rng.choice(turns)
            ids = [*played.token_ids]
            exchanges.append((ids[turn.prompt_start : turn.start], ids[turn.start : turn.stop]))
    return exchanges


def dependence_on_ranks(
    exchanges: Sequence[Exchange], score: Score, pad_token_id: int, device: torch.device
) -> dict[str, float]:
    """Average :func:`prompt_dependence` over the ranks; empty if a rank has less than two turns. Collective."""
    size = min(all_gather_objects([len(exchanges)]))  # the same on all ranks, as scoring is collective if sharded
    if size < 2:
        return {}
    found = all_gather_objects([prompt_dependence(exchanges[:size], score, pad_token_id, device)])
    return {name: fmean(one[name] for one in found) for name in found[0]}


def prompt_dependence(
    exchanges: Sequence[Exchange], score: Score, pad_token_id: int, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Score each answer under each prompt.

    Args:
        exchanges: At least two prompts with their answers.
        score: Runs the model.
        pad_token_id: Fills the ids.
        device: Where the tensors go.

    Returns:
        ``prompt_dependence/mutual_information`` in nats, and ``prompt_dependence/retrieval``.
    """
    pairs = [(prompt, answer) for (prompt, _), (_, answer) in product(exchanges, exchanges)]
    rows = [
        ([*prompt, *answer], [1] * (len(prompt) + len(answer)), [0] * len(prompt) + [1] * len(answer))
        for prompt, answer in pairs
    ]
    ids, attention_mask, labeled = padded_columns(rows, (pad_token_id, 0, 0), device)
    size = len(exchanges)
    logprobs = score(ids, attention_mask, labeled)[0].double().sum(1).reshape(size, size)  # [prompt, answer]
    information = logprobs.diagonal() - logprobs.logsumexp(0) + math.log(size)
    others = logprobs.masked_fill(torch.eye(size, dtype=torch.bool, device=logprobs.device), -math.inf)
    return {
        "prompt_dependence/mutual_information": float(information.mean()),
        "prompt_dependence/retrieval": float((logprobs.diagonal() > others.amax(0)).double().mean()),
    }
