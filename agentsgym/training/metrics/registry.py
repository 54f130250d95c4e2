"""The metrics that a run logs: their names, groups and meanings."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agentsgym.training.settings import GROUPS

_CLIPS = "a loss with clipping, except `cispo`"


def row(name: str, group: str, meaning: str, logged: str = "") -> tuple[str, str, str, str]:
    """Return the fields of a metric in the order of the table."""
    return name, group, meaning, logged


LISTED: Final[Mapping[str, Sequence[tuple[str, str, str, str]]]] = {
    "Rollouts": (
        row("reward", "summary", "mean final reward; with several roles, that of the role that moves first"),
        row("reward_std", "credit", "standard deviation of the final reward (n - 1)", "two rollouts or more"),
        row(
            "rewards/…/mean",
            "summary",
            "mean of a named reward's share of the final reward; 0 in rollouts that lack it",
            "[named rewards](your-environment.md#named-rewards)",
        ),
        row(
            "rewards/…/std", "credit", "standard deviation of this share (n - 1)", "named rewards, two rollouts or more"
        ),
        row(
            "win_rate",
            "summary",
            "fraction of rollouts won; if only some report an outcome, the others count as lost",
            '`info["success"]`',
        ),
        row(
            "fraction_of_optimal",
            "summary",
            "(reward - random) / (optimal - random)",
            '`info["random_reward"]`, `info["optimal_reward"]`',
        ),
        row(
            "info/…",
            "info",
            "mean of a number in `info` at the last step, over the rollouts that have it",
            "numbers in `info`",
        ),
        row("tools/call_frequency", "info", "mean number of tool calls that could be parsed", "tool calls"),
        row(
            "tools/failure_frequency", "info", "fraction of the parsed tool calls that failed or were not made", "tools"
        ),
        row("tools/unreadable", "info", "fraction of the tool calls that could not be parsed", "tool calls"),
        row("tools/repaired", "info", "fraction of the tool calls that were repaired", "tool calls"),
        row("tools/repaired/…", "info", "fraction of the tool calls with this kind of repair", "repaired calls"),
        row("turns/mean", "summary", "mean number of turns per rollout"),
        row("turns/min", "lengths", "smallest number of turns"),
        row("turns/max", "lengths", "largest number of turns"),
        row("reward/turn_00", "by_turn", "mean reward of turn k, over the rollouts that had a turn k"),
        row(
            "reward/by_role/…",
            "by_role",
            "mean total reward of the role, over rollouts with rewards per role",
            "roles (`_role`)",
        ),
        row("rewards/…/mean/by_role/…", "by_role", "`rewards/…/mean` of the role", "roles, named rewards"),
        row(
            "win_rate/by_role/…",
            "by_role",
            "fraction of rollouts that the role won, that is, in which it got the highest reward; "
            'with a single role, or if all roles got equal rewards, `info["success"]` decides',
            'roles, `info["success"]`',
        ),
        row(
            "reward/by_environment/…",
            "by_environment",
            "mean final reward per value of the column `environment` (set by `mix`), otherwise per class; "
            "to separate two configurations of a class, give them labels",
            "mixed batches",
        ),
        row(
            "win_rate/by_environment/…",
            "by_environment",
            "`win_rate` of the environment",
            'mixed batches, `info["success"]`',
        ),
        row(
            "fraction_of_optimal/by_environment/…",
            "by_environment",
            "`fraction_of_optimal` of the environment",
            'mixed batches, `info["random_reward"]`, `info["optimal_reward"]`',
        ),
        row(
            "rewards/…/mean/by_environment/…",
            "by_environment",
            "`rewards/…/mean` of the environment",
            "mixed batches, named rewards",
        ),
        row(
            "turns/by_environment/…",
            "by_environment",
            "mean number of turns per rollout of the environment",
            "mixed batches",
        ),
        row(
            "failed/by_environment/…",
            "by_environment",
            "fraction of the environment's rollouts that failed",
            "mixed batches",
        ),
        row("active_fraction/turn_00", "by_turn", "fraction of rollouts that had a turn k"),
        row("stop/done", "stops", "fraction of rollouts ended by the environment"),
        row("stop/max_turns", "stops", "fraction of rollouts ended by the turn limit"),
        row("stop/max_tokens", "stops", "fraction of rollouts ended by a token budget"),
        row("stop/invalid", "stops", "fraction of rollouts ended by invalid actions"),
        row("failed", "summary", "fraction of rollouts that failed"),
        row("rollouts/retried", "stops", "mean number of retries per rollout", "`episode_retries`"),
        row("invalid_turns", "stops", "fraction of turns with an invalid action"),
        row("unplaced_rewards", "stops", "fraction of turns that have a reward but no tokens, which no token bears"),
        row("exact", "stops", "fraction of rollouts whose agent tokens are all exactly as the agent returned them"),
        row("tokens/agent_per_turn", "lengths", "mean number of agent tokens per turn"),
        row("tokens/environment_per_turn", "lengths", "mean number of other tokens per turn"),
        row(
            "completions/mean_length", "lengths", "mean number of tokens after the first prompt, observations included"
        ),
        row("completions/min_length", "lengths", "smallest number of tokens after the first prompt"),
        row("completions/max_length", "lengths", "largest number of tokens after the first prompt"),
        row("completions/clipped_ratio", "lengths", "fraction of rollouts ended by a limit on turns or tokens"),
        row("num_tokens", "lengths", "number of training tokens so far"),
    ),
    "Credit": (
        row("advantage/turn_00", "by_turn", "mean advantage of turn k, as the estimator returned it"),
        row("advantage_std/turn_00", "by_turn", "standard deviation of the advantages of turn k"),
        row("advantage/by_role/…", "by_role", "mean advantage of the role's turns", "roles"),
        row("advantage_std/by_role/…", "by_role", "standard deviation of these advantages", "roles"),
        row(
            "frac_reward_zero_std",
            "summary",
            "fraction of task groups (per role) whose final rewards are all equal, before filters: "
            "`grpo` and `rloo` learn nothing from them",
        ),
        row("step_groups/mean_size", "credit", "mean number of a task's turns that share a state", "state keys"),
        row("step_groups/max_size", "credit", "largest number of a task's turns that share a state", "state keys"),
        row(
            "step_groups/singleton_fraction",
            "credit",
            "fraction of turns whose state no other turn has, which `gigpo` cannot compare",
            "state keys",
        ),
        row("groups/kept", "credit", "fraction of task groups (per role) that are trained on"),
        row(
            "groups/resampled",
            "credit",
            "number of replaced rollouts per rollout of the batch; 2 means that each was replaced twice on average",
            '`zero_variance_groups="resample"`',
        ),
        row(
            "league/rating",
            "summary",
            "rating of the policy before the batch, 25 at first",
            "[league](textarena.md#a-league)",
        ),
        row("league/uncertainty", "credit", "uncertainty of this rating (its standard deviation)", "league"),
        row(
            "curriculum/levels_known",
            "credit",
            "fraction of levels with enough results for a win rate",
            "[curriculum](mixing.md#a-curriculum)",
        ),
        row(
            "curriculum/levels_in_bounds",
            "credit",
            "fraction of levels whose win rate is within its bounds",
            "curriculum",
        ),
        row(
            "observation_loss",
            "loss",
            "mean of -log p over observation tokens, without the weight",
            "observation_loss_weight",
        ),
        row(
            "demonstration_loss",
            "loss",
            "mean of -log p over the tokens of demonstrations, without the weight",
            "[`demonstrations`](training.md#imitating-during-training)",
        ),
        row("value_loss", "credit", "mean of ½ (V - target)², times the head's `loss_weight`", "value head"),
    ),
    "Loss": (
        row("entropy/turn_00", "by_turn", "entropy of the policy in turn k"),
        row(
            "ratio/turn_00",
            "by_turn",
            "mean importance ratio in turn k (current policy to sampling policy); 1 if each batch is used for one step",
        ),
        row("clip_ratio/turn_00", "by_turn", "fraction of turn k's tokens that are clipped", "not `sapo` or `vespo`"),
        row(
            "effective_sample_size",
            "loss",
            "(Σ w)² / (N Σ w²) over rows, where w is the ratio of a whole row: "
            "from 1/N (one row dominates) to 1 (equal weights)",
        ),
        row("loss", "summary", "the loss, value head included"),
        row("grad_norm", "summary", "norm of the policy's gradient before clipping"),
        row("learning_rate", "summary", "learning rate of the policy"),
        row("step_time", "loss", "duration of an optimizer step in seconds"),
        row("epoch", "summary", "number of passes over the dataset"),
        row("entropy", "summary", "mean entropy over all agent tokens"),
        row("policy_loss", "loss", "the loss without the entropy bonus", "an entropy bonus"),
        row("entropy_coef", "loss", "weight of the entropy bonus", "an entropy bonus"),
        row("kl", "summary", "KL divergence from the reference model", "`beta` above 0"),
        row("clip_ratio/low_mean", "loss", "fraction of tokens clipped at the lower bound", _CLIPS),
        row("clip_ratio/high_mean", "loss", "fraction of tokens clipped at the upper bound", _CLIPS),
        row("clip_ratio/region_mean", "loss", "fraction of tokens clipped at either bound", _CLIPS),
        row("clip_ratio/low_min", "loss", "smallest fraction of a row's tokens clipped at the lower bound", _CLIPS),
        row("clip_ratio/high_max", "loss", "largest fraction of a row's tokens clipped at the upper bound", _CLIPS),
        row("cispo_clip_ratio", "loss", "fraction of tokens whose ratio is capped", "`cispo`"),
        row("vespo/phi_seq_mean", "loss", "mean weight of a row", "`vespo`"),
        row("aux_loss", "loss", "load-balancing loss of a mixture of experts", "a mixture-of-experts model"),
    ),
    "Sampler": (
        row("sampling/sampling_logp_difference/mean", "sampler", "mean absolute difference of log-probabilities"),
        row("sampling/sampling_logp_difference/max", "sampler", "largest absolute difference of log-probabilities"),
        row(
            "sampling/importance_sampling_ratio/min",
            "sampler",
            "smallest probability ratio model / sampler, before clipping",
        ),
        row("sampling/importance_sampling_ratio/mean", "sampler", "mean probability ratio model / sampler"),
        row("sampling/importance_sampling_ratio/max", "sampler", "largest probability ratio model / sampler"),
        row("sampling/kl/k1", "sampler", "estimate of KL(sampler, model): mean of log(sampler / model)"),
        row("sampling/kl/k3", "sampler", "estimate of the same KL that is never negative"),
        row(
            "sampling/effective_sample_size",
            "sampler",
            "like `effective_sample_size`, where w is a row's ratio model / sampler",
        ),
        row("sampling/effective_sample_size_of_tokens", "sampler", "effective sample size over agent tokens, not rows"),
        row(
            "sampling/cut_fraction",
            "sampler",
            "fraction of agent tokens that the correction caps or masks; only with a correction",
        ),
        row(
            "distillation/kl",
            "sampler",
            "estimate of KL(policy, teacher) per token, by the sampled tokens",
            "`distillation`",
        ),
        row(
            "prompt_dependence/mutual_information",
            "sampler",
            "mutual information of prompts and answers in nats, over eight turns of different tasks",
        ),
        row(
            "prompt_dependence/retrieval",
            "sampler",
            "fraction of these answers that are likelier under their own prompt than under any other",
        ),
    ),
    "Staleness": (
        row(
            "staleness/mean",
            "sampler",
            "mean number of updates between the weights that sampled a turn and the current ones",
        ),
        row(
            "staleness/max",
            "sampler",
            "largest number of updates between the weights that sampled a turn and the current ones",
        ),
        row("staleness/mixed_rollouts", "sampler", "fraction of rollouts sampled by several versions of the weights"),
        row("staleness/wait_s", "sampler", "seconds that training waited for the batch"),
    ),
    "Evaluation": (
        row("eval_win_rate", "summary", "fraction of episodes won, if the environment reports outcomes"),
        row("eval_win_rate_low", "summary", "lower end of the win rate's interval"),
        row("eval_win_rate_high", "summary", "upper end of the win rate's interval"),
        row("eval_reward", "summary", "mean final reward"),
        row("eval_reward_low", "summary", "lower end of the reward's interval"),
        row("eval_reward_high", "summary", "upper end of the reward's interval"),
        row("eval_rewards/…/mean_low", "summary", "lower end of a named reward's interval", "named rewards"),
        row("eval_rewards/…/mean_high", "summary", "upper end of a named reward's interval", "named rewards"),
        row("eval_turns", "lengths", "mean number of turns"),
        row("eval_turns_low", "lengths", "lower end of the interval for the mean number of turns"),
        row("eval_turns_high", "lengths", "upper end of the interval for the mean number of turns"),
        row("eval_num_episodes", "summary", "number of episodes"),
        row("eval_num_failed", "stops", "number of failed episodes"),
    ),
}


__all__ = ["GROUPS", "METRICS", "Metric", "metric_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: The key in the log. ``turn_00`` stands for the index of any turn, ``…`` for a role or an environment.
        section: The heading of the metric's table in ``docs/metrics.md``, for what is measured.
        group: A key of :data:`GROUPS`.
        meaning: The meaning, as Markdown; links are relative to ``docs``.
        logged: The condition for the metric to be logged, as Markdown; empty for no condition beyond the section's.
    """

    name: str
    section: str
    group: str
    meaning: str
    logged: str = ""

    @property
    def pattern(self) -> str:
        """A regular expression for the metric's keys in training."""
        return re.escape(self.name).replace("turn_00", r"turn_\d+").replace("…", ".+")


METRICS: Final = tuple(
    Metric(name=name, section=section, group=group, meaning=meaning, logged=logged)
    for section, rows in LISTED.items()
    for name, group, meaning, logged in rows
)
"""Every metric, in the order of ``docs/metrics.md``."""


@functools.cache
def metric_of(key: str) -> Metric | None:
    """The metric that a key of the log belongs to; None for other keys, such as those of transformers.

    An evaluation's keys are found with their prefix, ``eval_`` or, with several evaluation sets, ``eval_NAME_``.

    >>> metric_of("reward/turn_07").group, metric_of("eval_win_rate").group, metric_of("train_runtime")
    ('by_turn', 'summary', None)
    """
    for prefix in ("", "eval_", "eval_.+?_"):
        for metric in METRICS:
            # The pattern of a metric that only evaluations have begins with the prefix already.
            pattern = prefix + metric.pattern.removeprefix("eval_") if prefix else metric.pattern
            if re.fullmatch(pattern, key, re.DOTALL):
                return metric
    return None
