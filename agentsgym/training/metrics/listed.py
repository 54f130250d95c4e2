"""The table of all metrics, which :mod:`agentsgym.training.metrics.registry` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final


def row(name: str, group: str, meaning: str, logged: str = "") -> tuple[str, str, str, str]:
    """Return the fields of a metric in the order of the table."""
    return name, group, meaning, logged


LISTED: Final[Mapping[str, Sequence[tuple[str, str, str, str]]]] = {
    "Rollouts": (
        row("reward", "summary", "mean final reward; with roles, that of the role of the first turn"),
        row("reward_std", "credit", "its standard deviation (n - 1)", "two rollouts or more"),
        row(
            "win_rate",
            "summary",
            "fraction of rollouts won; one without an outcome counts as lost if others have one",
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
        row("turns/mean", "summary", "mean turns of a rollout"),
        row("turns/min", "lengths", "fewest turns"),
        row("turns/max", "lengths", "most turns"),
        row("reward/turn_00", "by_turn", "mean reward of turn k, over the rollouts that had one"),
        row(
            "reward/by_role/…",
            "by_role",
            "mean total reward of the role, over rollouts that give rewards by role",
            "roles (`_role`)",
        ),
        row(
            "win_rate/by_role/…",
            "by_role",
            'fraction of its rollouts that the role won: by `info["success"]` if it is the only role or all '
            "rewards are equal, else by the highest reward",
            "roles and outcomes",
        ),
        row(
            "reward/by_environment/…",
            "by_environment",
            "mean final reward by the row's `environment` (set by `mix`), else by class; "
            "label two configurations of one class to separate them",
            "mixed batches",
        ),
        row("win_rate/by_environment/…", "by_environment", "its `win_rate`", 'mixed batches, `info["success"]`'),
        row(
            "fraction_of_optimal/by_environment/…",
            "by_environment",
            "its `fraction_of_optimal`",
            "mixed batches, both references",
        ),
        row("turns/by_environment/…", "by_environment", "its mean turns", "mixed batches"),
        row("failed/by_environment/…", "by_environment", "fraction of its rollouts that failed", "mixed batches"),
        row("active_fraction/turn_00", "by_turn", "fraction of rollouts that had a turn k"),
        row("stop/done", "stops", "fraction ended by the environment"),
        row("stop/max_turns", "stops", "fraction ended by the turn limit"),
        row("stop/max_tokens", "stops", "fraction ended by a token budget"),
        row("stop/invalid", "stops", "fraction ended by invalid actions"),
        row("failed", "summary", "fraction that failed"),
        row("rollouts/retried", "stops", "mean retries of a rollout", "`episode_retries`"),
        row("invalid_turns", "stops", "fraction of turns with an invalid action"),
        row("exact", "stops", "fraction whose agent tokens are all as the agent returned them"),
        row("tokens/agent_per_turn", "lengths", "mean agent tokens of a turn"),
        row("tokens/environment_per_turn", "lengths", "mean other tokens of a turn"),
        row("completions/mean_length", "lengths", "mean tokens after the first prompt, observations included"),
        row("completions/min_length", "lengths", "the shortest"),
        row("completions/max_length", "lengths", "the longest"),
        row("completions/clipped_ratio", "lengths", "fraction ended by a budget of turns or tokens"),
        row("num_tokens", "lengths", "training tokens so far"),
    ),
    "Credit": (
        row("advantage/turn_00", "by_turn", "mean advantage of turn k, as the estimator returned it"),
        row("advantage_std/turn_00", "by_turn", "its standard deviation"),
        row("advantage/by_role/…", "by_role", "mean advantage of the role's turns", "roles"),
        row("advantage_std/by_role/…", "by_role", "its standard deviation", "roles"),
        row(
            "frac_reward_zero_std",
            "summary",
            "fraction of task groups (per role) whose final rewards are all equal, before filters: "
            "`grpo` and `rloo` learn nothing from them",
        ),
        row("step_groups/mean_size", "credit", "mean number of turns in the same state of a task", "state keys"),
        row("step_groups/max_size", "credit", "the largest such group", "state keys"),
        row(
            "step_groups/singleton_fraction",
            "credit",
            "fraction of turns alone in their state, which `gigpo` cannot compare",
            "state keys",
        ),
        row("groups/kept", "credit", "fraction of task groups (per role) that are trained on"),
        row(
            "groups/resampled",
            "credit",
            "replaced rollouts per rollout of the batch; 2 means each was replaced twice on average",
            '`zero_variance_groups="resample"`',
        ),
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
        row("value_loss", "credit", "½ (V - target)² over all targets, times `loss_weight`", "value head"),
    ),
    "Loss": (
        row("entropy/turn_00", "by_turn", "entropy of the policy in turn k"),
        row(
            "ratio/turn_00",
            "by_turn",
            "importance ratio, trained to sampling weights, in turn k; 1 where a batch is used once",
        ),
        row("clip_ratio/turn_00", "by_turn", "fraction of turn k's tokens that are clipped", "not `sapo`, `vespo`"),
        row(
            "effective_sample_size",
            "loss",
            "(Σ w)² / (N Σ w²) over rows, w the ratio of a whole row: "
            "from 1/N (one row dominates) to 1 (equal weights)",
        ),
        row("loss", "summary", "the loss, value head included"),
        row("grad_norm", "summary", "norm of the policy's gradient before clipping"),
        row("learning_rate", "summary", "the policy's"),
        row("step_time", "loss", "seconds of an optimizer step"),
        row("epoch", "summary", "passes over the dataset"),
        row("entropy", "summary", "entropy over all agent tokens"),
        row("policy_loss", "loss", "the loss without the entropy bonus", "entropy bonus"),
        row("entropy_coef", "loss", "weight of the bonus", "entropy bonus"),
        row("kl", "summary", "KL to the reference model", "`beta`"),
        row(
            "clip_ratio/low_mean",
            "loss",
            "fraction of tokens clipped at the lower bound",
            "clipping losses but `cispo`",
        ),
        row("clip_ratio/high_mean", "loss", "fraction clipped at the upper bound", "likewise"),
        row("clip_ratio/region_mean", "loss", "fraction clipped at either", "likewise"),
        row("clip_ratio/low_min", "loss", "lowest fraction of a row at the lower bound", "likewise"),
        row("clip_ratio/high_max", "loss", "highest fraction of a row at the upper bound", "likewise"),
        row("cispo_clip_ratio", "loss", "fraction of tokens whose ratio is cut", "`cispo`"),
        row("vespo/phi_seq_mean", "loss", "mean weight of a row", "`vespo`"),
        row("aux_loss", "loss", "load balancing of a mixture of experts", "such a model"),
    ),
    "Sampler": (
        row("sampling/sampling_logp_difference/mean", "sampler", "mean gap in log-probability"),
        row("sampling/sampling_logp_difference/max", "sampler", "largest gap"),
        row("sampling/importance_sampling_ratio/min", "sampler", "smallest ratio model / sampler, not clipped"),
        row("sampling/importance_sampling_ratio/mean", "sampler", "mean ratio"),
        row("sampling/importance_sampling_ratio/max", "sampler", "largest ratio"),
        row("sampling/kl/k1", "sampler", "estimate of KL(sampler, model): mean log ratio"),
        row("sampling/kl/k3", "sampler", "the same, never negative"),
        row(
            "sampling/effective_sample_size",
            "sampler",
            "as `effective_sample_size`, with each row's ratio model / sampler",
        ),
        row("sampling/effective_sample_size_of_tokens", "sampler", "the same over agent tokens"),
        row(
            "sampling/cut_fraction",
            "sampler",
            "fraction of agent tokens that the correction cuts or masks; only with a correction",
        ),
    ),
    "Staleness": (
        row("staleness/mean", "sampler", "mean updates since the weights that sampled a turn"),
        row("staleness/max", "sampler", "the oldest turn"),
        row("staleness/mixed_rollouts", "sampler", "fraction of rollouts sampled by several versions of the weights"),
        row("staleness/wait_s", "sampler", "seconds that training waited for the batch"),
    ),
    "Evaluation": (
        row("eval_win_rate", "summary", "fraction of episodes won, if the environment reports outcomes"),
        row("eval_win_rate_low", "summary", "lower end of its 95 % interval, tasks resampled"),
        row("eval_win_rate_high", "summary", "upper end"),
        row("eval_reward", "summary", "mean final reward"),
        row("eval_reward_low", "summary", "lower end of its interval"),
        row("eval_reward_high", "summary", "upper end"),
        row("eval_turns", "lengths", "mean turns"),
        row("eval_turns_low", "lengths", "lower end of its interval"),
        row("eval_turns_high", "lengths", "upper end"),
        row("eval_num_episodes", "summary", "number of episodes"),
        row("eval_num_failed", "stops", "number of failed episodes"),
    ),
}
