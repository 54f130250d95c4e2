"""What a generation batch is worth watching for, turn by turn, and an evaluation in plain numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import stdev

from agentsgym.evaluation.metrics import Evaluation, fraction_of_optimal
from agentsgym.types import StopReason, Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Summarise a generation batch; failed rollouts count in ``failed`` and nowhere else.

    Returns:
        ``reward`` (mean final reward), ``reward_std`` (n - 1 in the denominator; where two or more were played),
        ``completions/{mean,min,max}_length`` (tokens after the first prompt, observations included),
        ``completions/clipped_ratio`` (share that a budget ended), all four as TRL names them;
        ``win_rate`` (where the game says who won), ``fraction_of_optimal`` (where it says what random and optimal play
        are paid on average), ``turns/{mean,min,max}``,
        ``reward/turn_{k}`` (mean over the rollouts that had a turn k) and ``alive/turn_{k}`` (their share),
        ``stop/{reason}`` (shares), ``invalid_turns`` (share), ``tokens/agent_per_turn``,
        ``tokens/environment_per_turn``, ``failed`` and ``exact`` (shares).
    """
    played = [trajectory for trajectory in trajectories if not trajectory.failed]
    metrics = {
        f"stop/{reason.value}": _mean([trajectory.stop_reason is reason for trajectory in trajectories])
        for reason in StopReason
        if reason is not StopReason.FAILED
    }
    metrics["failed"] = _mean([trajectory.failed for trajectory in trajectories])
    if not played:
        return metrics
    metrics["reward"] = _mean([trajectory.final_reward for trajectory in played])
    if len(played) > 1:
        metrics["reward_std"] = stdev(trajectory.final_reward for trajectory in played)
    metrics["exact"] = _mean([trajectory.exact for trajectory in played])
    outcomes = [trajectory.success for trajectory in played]
    if any(outcome is not None for outcome in outcomes):
        metrics["win_rate"] = _mean([bool(outcome) for outcome in outcomes])
    anchors = [_anchors(trajectory) for trajectory in played]
    told = [(row.final_reward, *pair) for row, pair in zip(played, anchors, strict=True) if pair is not None]
    if told:
        value, random, optimal = (_mean(numbers) for numbers in zip(*told, strict=True))
        if random != optimal:
            metrics["fraction_of_optimal"] = fraction_of_optimal(value, random=random, optimal=optimal)
    return metrics | _turn_metrics(played) | _token_metrics(played) | _completion_metrics(played)


def without_tokens(trajectory: Trajectory) -> Trajectory:
    """What the metrics read of a rollout, small enough to be sent to every rank."""
    return replace(
        trajectory,
        token_ids=range(len(trajectory.token_ids)),
        logprobs=None,
        per_token_rewards=(),
        turns=[replace(turn, state_key=None, prompt_messages=None) for turn in trajectory.turns],
        info={name: trajectory.info[name] for name in _TOLD if name in trajectory.info},
    )


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Flatten an evaluation to numbers: the counts, and each estimate with its interval, ``…_low`` and ``…_high``."""
    estimates = {"win_rate": evaluation.win_rate, "reward": evaluation.reward, "turns": evaluation.turns}
    metrics: dict[str, float] = {"num_games": evaluation.num_games, "num_failed": evaluation.num_failed}
    for name, estimate in estimates.items():
        if estimate is not None:
            metrics |= {name: estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return metrics


_TOLD = ("success", "random_reward", "optimal_reward")


def _anchors(trajectory: Trajectory) -> tuple[float, float] | None:
    """What random and optimal play are paid on average from where this rollout began."""
    random, optimal = (trajectory.info.get(name) for name in ("random_reward", "optimal_reward"))
    return None if random is None or optimal is None else (float(random), float(optimal))


def _turn_metrics(played: Sequence[Trajectory]) -> dict[str, float]:
    counts = [len(trajectory.turns) for trajectory in played]
    by_index: defaultdict[int, list[float]] = defaultdict(list)
    for trajectory in played:
        for k, reward in enumerate(trajectory.turn_rewards):
            by_index[k].append(reward)
    metrics = {"turns/mean": _mean(counts), "turns/min": float(min(counts)), "turns/max": float(max(counts))}
    metrics["invalid_turns"] = _mean([turn.invalid for trajectory in played for turn in trajectory.turns])
    for k, rewards in by_index.items():
        metrics[f"reward/turn_{k:02d}"] = _mean(rewards)
        metrics[f"alive/turn_{k:02d}"] = len(rewards) / len(played)
    return metrics


def _token_metrics(played: Sequence[Trajectory]) -> dict[str, float]:
    num_turns = max(1, sum(len(trajectory.turns) for trajectory in played))
    agent = sum(turn.stop - turn.start for trajectory in played for turn in trajectory.turns)
    total = sum(len(trajectory.token_ids) for trajectory in played)
    return {"tokens/agent_per_turn": agent / num_turns, "tokens/environment_per_turn": (total - agent) / num_turns}


def _completion_metrics(played: Sequence[Trajectory]) -> dict[str, float]:
    lengths = [len(row.token_ids) - row.turns[0].start if row.turns else 0 for row in played]
    return {
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": _mean([row.stop_reason.truncated for row in played]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
