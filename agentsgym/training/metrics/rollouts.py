"""Summarize rollouts in a few numbers, which ranks exchange, and compute the metrics of a batch and of its age."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import stdev
from typing import Self

from agentsgym.batch.layouts import TrainingRow
from agentsgym.credit.scored import ScoredRollout
from agentsgym.statistics.breakdown import RolloutOutcome, by_label, by_role, components_by_name
from agentsgym.statistics.metrics import Evaluation, fraction_of_optimal
from agentsgym.texts import visible
from agentsgym.training.tensors.logprobs import KnownLogprobs
from agentsgym.types import Message, StopReason, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """The summary of a rollout that all ranks share: numbers and keys, without tokens or messages.

    Attributes:
        scored: The rollout in the form that estimators use.
        turn_rewards: The environment's reward of each turn, before ``turn_credit``, (K,).
        stop_reason: Why the last episode ended.
        success: Whether the task was solved; None if the environment does not report it.
        exact: Whether all agent tokens are exactly those that the agent returned.
        num_invalid: Number of turns with an invalid action.
        num_without_tokens: Number of turns that have a reward but no tokens.
        num_tokens: Number of tokens, including prompts and observations.
        num_prompt_tokens: Number of tokens before the first action; all tokens if there is no action.
        references: The mean rewards of random and of optimal play from this start; None if unknown.
        logprobs: Whether all, some or none of the agent tokens have a log-probability from the sampler.
        num_rows: Number of training rows.
        num_row_tokens: Total number of tokens of these rows; more than ``num_tokens`` if a history was rewritten.
        num_trained_tokens: Number of agent tokens in these rows that can be trained on: a row's first token cannot.
        error: The traceback of a failed rollout (in the trainer, only for each rank's first failure); otherwise None.
        num_retries: Number of failed attempts before this one; None if failed rollouts are not retried.
        environment: The environment's name in metrics: the row's ``environment`` column, set by ``mix``, or else the
            class name.
        metrics: The numbers in the environment's ``info``.
        num_calls: Number of tool calls: ``"parsed"``, ``"unreadable"``, and by kind of repair; None without tools.
        num_failed_calls: Number of tool calls that failed or were not made; None if it is unknown.
    """

    scored: ScoredRollout
    turn_rewards: Sequence[float]
    stop_reason: StopReason
    success: bool | None
    exact: bool
    num_invalid: int
    num_without_tokens: int
    num_tokens: int
    num_prompt_tokens: int
    references: tuple[float, float] | None
    logprobs: KnownLogprobs
    num_rows: int
    num_row_tokens: int
    num_trained_tokens: int
    error: str | None
    num_retries: int | None = None
    environment: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    num_calls: Mapping[str, int] | None = None
    num_failed_calls: int | None = None

    @classmethod
    def of(cls, trajectory: Trajectory, rows: Sequence[TrainingRow], scored: ScoredRollout) -> Self:
        """Summarize a rollout.

        Args:
            trajectory: The rollout.
            rows: Its training rows.
            scored: The rollout as estimators see it.
        """
        num_tokens = len(trajectory.token_ids)
        random, optimal = trajectory.info.get("random_reward"), trajectory.info.get("optimal_reward")
        logprobs: KnownLogprobs = "all"  # also for a failed rollout, which is not trained on
        if not trajectory.failed and trajectory.logprobs is None:
            logprobs = "none"
        elif not trajectory.failed and math.isnan(sum(trajectory.logprobs or ())):
            logprobs = "some"
        return cls(
            scored=scored,
            turn_rewards=trajectory.turn_rewards,
            stop_reason=trajectory.stop_reason,
            success=trajectory.success,
            exact=trajectory.exact,
            num_invalid=sum(turn.invalid for turn in trajectory.turns),
            num_without_tokens=sum(turn.reward != 0 and turn.start == turn.stop for turn in trajectory.turns),
            num_tokens=num_tokens,
            num_prompt_tokens=trajectory.turns[0].start if trajectory.turns else num_tokens,
            references=None if random is None or optimal is None else (float(random), float(optimal)),
            logprobs=logprobs,
            num_rows=len(rows),
            num_row_tokens=sum(map(len, rows)),
            num_trained_tokens=sum(
                max(0, turn.stop - max(turn.start, row.span.start + 1)) for row in rows for _, turn in row.turns
            ),
            error=trajectory.error,
            metrics=trajectory.metrics,
            num_calls=trajectory.info.get("calls_read"),
            num_failed_calls=failed if type(failed := trajectory.info.get("num_failed_calls")) is int else None,
        )

    @property
    def final_reward(self) -> float:
        """The reward of the rollout."""
        return self.scored.final_reward

    @property
    def final_rewards(self) -> Mapping[Hashable, float]:
        """The total reward of each role; empty without rewards by role."""
        return self.scored.final_rewards

    @property
    def final_components(self) -> Mapping[str, float] | None:
        """The numbers of the final reward by name; None for a plain number."""
        return {name: one.final_reward for name, one in self.scored.components.items()} or None

    @property
    def role_components(self) -> Mapping[Hashable, Mapping[str, float]]:
        """The numbers of each role's final reward by name; empty if rewards are not given by role and name."""
        parts = self.scored.components.items()
        roles = dict.fromkeys(role for _, one in parts for role in one.final_rewards)
        return {role: {name: one.final_rewards[role] for name, one in parts} for role in roles}

    @property
    def roles(self) -> Sequence[Hashable]:
        """The role of each turn, (K,)."""
        return self.scored.roles

    @property
    def failed(self) -> bool:
        """Whether the environment or the agent failed."""
        return self.stop_reason is StopReason.FAILED

    @property
    def num_turns(self) -> int:
        """The number of turns."""
        return len(self.turn_rewards)

    @property
    def num_agent_tokens(self) -> int:
        """The number of agent tokens."""
        return sum(self.scored.token_counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRow:
    """A line of TRL's completions table.

    Attributes:
        prompt: The messages before the agent's first message.
        completion: The rest of the conversation.
        final_reward: The rollout's final reward.
        mean_advantage: The mean over the agent tokens, since the table has one number per row.
        turn_rewards: One reward per turn.
        stop_reason: Why the rollout ended.
    """

    prompt: list[Message]
    completion: list[Message]
    final_reward: float
    mean_advantage: float
    turn_rewards: list[float]
    stop_reason: str

    @classmethod
    def of(cls, trajectory: Trajectory, advantages: Sequence[float]) -> Self:
        """Convert a rollout with the advantages of its tokens, (T,); control characters are escaped."""
        first = trajectory.turns[0].message_index if trajectory.turns else len(trajectory.messages)
        return cls(
            prompt=[*map(_printable, trajectory.messages[:first])],
            completion=[*map(_printable, trajectory.messages[first:])],
            final_reward=trajectory.final_reward,
            mean_advantage=sum(advantages) / max(1, sum(trajectory.agent_token_mask)),
            turn_rewards=list(trajectory.turn_rewards),
            stop_reason=trajectory.stop_reason.value,
        )


def _printable(message: Message) -> Message:
    return {**message, "role": visible(message["role"]), "content": visible(message["content"])}


def rollout_metrics(rollouts: Sequence[RolloutSummary]) -> dict[str, float]:
    """Summarize a generation batch; failed rollouts count in ``failed`` and nowhere else.

    Returns:
        ``reward`` (mean final reward), ``reward_std`` (n - 1 in the denominator; if at least two rollouts did not
        fail), ``completions/{mean,min,max}_length`` (tokens after the first prompt, observations included) and
        ``completions/clipped_ratio`` (fraction that a token or turn limit ended), these four with TRL's names;
        ``win_rate`` (if the environment reports success), ``fraction_of_optimal`` (if it reports the mean rewards of
        random and optimal play), ``turns/{mean,min,max}``, ``reward/turn_{k:02d}`` (mean over the rollouts that had a
        turn k) and ``active_fraction/turn_{k:02d}`` (their fraction), ``stop/{reason}`` (fractions), ``invalid_turns``
        and ``unplaced_rewards`` (fractions), ``tokens/agent_per_turn``, ``tokens/environment_per_turn``, ``failed`` and
        ``exact`` (fractions), ``info/{key}`` (each number of ``info``, mean over the rollouts that have it),
        ``tools/call_frequency`` (mean number of tool calls that could be parsed) and ``tools/failure_frequency``
        (fraction of these that failed or were not made, if the environment counts them), with TRL's names, and
        ``tools/{unreadable,repaired}`` and ``tools/repaired/{kind}`` (fractions of all calls), with tools only,
        ``rollouts/retried`` (if failed rollouts are retried: the mean number of retries per rollout);
        ``rewards/{name}/{mean,std}`` of each named reward, with TRL's names (0 in a rollout that lacks it);
        ``reward/by_role/{role}`` and ``win_rate/by_role/{role}`` if turns have named roles; and, in a batch of several
        environments, ``{name}/by_environment/{environment}`` of ``reward``, ``win_rate``, ``fraction_of_optimal``,
        ``turns`` and ``failed``.
    """
    metrics = {
        f"stop/{reason.value}": _mean([rollout.stop_reason is reason for rollout in rollouts])
        for reason in StopReason
        if reason is not StopReason.FAILED
    }
    metrics["failed"] = _mean([rollout.failed for rollout in rollouts])
    retries = [rollout.num_retries for rollout in rollouts if rollout.num_retries is not None]
    if retries:
        metrics["rollouts/retried"] = _mean(retries)
    environments = by_label(rollout.environment for rollout in rollouts)
    for name, indices in environments.items() if len(environments) > 1 else ():
        own = [rollouts[i] for i in indices]
        played = [rollout for rollout in own if not rollout.failed]
        numbers = {"failed": _mean([rollout.failed for rollout in own])}
        if played:
            numbers["reward"] = _mean([rollout.final_reward for rollout in played])
            numbers["turns"] = _mean([rollout.num_turns for rollout in played])
            numbers |= _outcome_metrics(played) | _component_means(played)
        metrics |= {f"{key}/by_environment/{name}": number for key, number in numbers.items()}
    played = [rollout for rollout in rollouts if not rollout.failed]
    return metrics | _reward_metrics(played) | _turn_metrics(played) | _call_metrics(played) if played else metrics


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Flatten an evaluation to numbers: the counts, and each estimate with its interval, ``…_low`` and ``…_high``."""
    estimates = {"win_rate": evaluation.win_rate, "reward": evaluation.reward, "turns": evaluation.turns}
    estimates |= {f"rewards/{name}/mean": estimate for name, estimate in evaluation.components.items()}
    estimates |= {f"info/{name}": estimate for name, estimate in evaluation.metrics.items()}
    metrics: dict[str, float] = {"num_episodes": evaluation.num_episodes, "num_failed": evaluation.num_failed}
    for name, estimate in estimates.items():
        if estimate is not None:
            metrics |= {name: estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return metrics


def _outcome_metrics(played: Sequence[RolloutSummary]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if any(rollout.success is not None for rollout in played):
        metrics["win_rate"] = _mean([bool(rollout.success) for rollout in played])
    known = [(rollout.final_reward, *rollout.references) for rollout in played if rollout.references is not None]
    if known:
        value, random, optimal = (_mean(values) for values in zip(*known, strict=True))
        if random != optimal:
            metrics["fraction_of_optimal"] = fraction_of_optimal(value, random=random, optimal=optimal)
    return metrics


def _component_means(played: Sequence[RolloutOutcome]) -> dict[str, float]:
    return {f"rewards/{name}/mean": _mean(own) for name, own in components_by_name(played).items()}


def _reward_metrics(played: Sequence[RolloutSummary]) -> dict[str, float]:
    """Compute the metrics of rewards and outcomes: over all rollouts, by role, and the numbers of ``info``."""
    metrics = {"reward": _mean([rollout.final_reward for rollout in played])}
    if len(played) > 1:
        metrics["reward_std"] = stdev(rollout.final_reward for rollout in played)
        metrics |= {f"rewards/{name}/std": stdev(own) for name, own in components_by_name(played).items()}
    metrics["exact"] = _mean([rollout.exact for rollout in played])
    metrics |= _outcome_metrics(played) | _component_means(played)
    for role, rows in by_role(played).items():
        metrics[f"reward/by_role/{role}"] = _mean([one.final_reward for _, one in rows])
        if any(one.success is not None for _, one in rows):
            metrics[f"win_rate/by_role/{role}"] = _mean([bool(one.success) for _, one in rows])
        own = _component_means([one for _, one in rows])
        metrics |= {f"{name}/by_role/{role}": mean for name, mean in own.items()}
    values: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in played:
        for name, value in rollout.metrics.items():
            values[name].append(value)
    return metrics | {f"info/{name}": _mean(own) for name, own in values.items()}


def _turn_metrics(played: Sequence[RolloutSummary]) -> dict[str, float]:
    counts = [rollout.num_turns for rollout in played]
    num_turns = max(1, sum(counts))
    num_agent_tokens = sum(rollout.num_agent_tokens for rollout in played)
    lengths = [rollout.num_tokens - rollout.num_prompt_tokens for rollout in played]
    metrics = {
        "turns/mean": _mean(counts),
        "turns/min": float(min(counts)),
        "turns/max": float(max(counts)),
        "invalid_turns": sum(rollout.num_invalid for rollout in played) / num_turns,
        "unplaced_rewards": sum(rollout.num_without_tokens for rollout in played) / num_turns,
    }
    rewards: defaultdict[int, list[float]] = defaultdict(list)
    for rollout in played:
        for k, reward in enumerate(rollout.turn_rewards):
            rewards[k].append(reward)
    for k, own in rewards.items():
        metrics[f"reward/turn_{k:02d}"] = _mean(own)
        metrics[f"active_fraction/turn_{k:02d}"] = len(own) / len(played)
    return metrics | {
        "tokens/agent_per_turn": num_agent_tokens / num_turns,
        "tokens/environment_per_turn": (sum(rollout.num_tokens for rollout in played) - num_agent_tokens) / num_turns,
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": _mean([rollout.stop_reason.truncated for rollout in played]),
    }


def _call_metrics(played: Sequence[RolloutSummary]) -> dict[str, float]:
    if all(one.num_calls is None for one in played):
        return {}
    counts = sum((Counter(one.num_calls) for one in played), Counter[str]())
    total, num_parsed, num_unreadable = counts.total(), counts.pop("parsed", 0), counts.pop("unreadable", 0)
    num_made = num_parsed + counts.total()
    shares = {"unreadable": num_unreadable, "repaired": counts.total()}
    shares |= {f"repaired/{kind}": number for kind, number in counts.items()}
    metrics = {"call_frequency": num_made / len(played)} | {name: one / max(total, 1) for name, one in shares.items()}
    failed = [one.num_failed_calls for one in played if one.num_failed_calls is not None]
    if failed:
        metrics["failure_frequency"] = sum(failed) / max(num_made, 1)
    return {f"tools/{name}": value for name, value in metrics.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def staleness_metrics(
    versions: Sequence[Sequence[int]], age: Callable[[int], int], waits_s: Sequence[float]
) -> dict[str, float]:
    """Compute the logged metrics of all ranks.

    Args:
        versions: The policy versions of each rollout's turns, as far as they are known.
        age: Returns the age of a policy version, in updates.
        waits_s: Seconds that each rank waited for the batch.

    Returns:
        ``staleness/mean`` and ``staleness/max`` over turns, in updates; ``staleness/mixed_rollouts``, the fraction of
        rollouts with several policy versions; ``staleness/wait_s``, the longest wait of any rank in seconds.
    """
    known = [own for own in versions if own]
    ages = [age(version) for own in known for version in own]
    return {
        "staleness/mean": _mean(ages),
        "staleness/max": float(max(ages, default=0)),
        "staleness/mixed_rollouts": _mean([len(set(own)) > 1 for own in known]),
        "staleness/wait_s": max(waits_s),
    }
