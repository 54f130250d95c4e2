"""The metrics of a run as plain rows, from which :mod:`agentsgym.training.metrics.registry` is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final


def row(name: str, group: str, meaning: str, logged: str = "") -> tuple[str, str, str, str]:
    """Give the fields of a metric in the order of the table."""
    return name, group, meaning, logged


LISTED: Final[Mapping[str, Sequence[tuple[str, str, str, str]]]] = {
    "Rollouts": (
        row(
            "reward",
            "summary",
            "mean final reward; of a rollout that pays by role, that of the role of its first turn",
            "always",
        ),
        row("reward_std", "credit", "its standard deviation (n - 1)", "with two rollouts or more"),
        row(
            "win_rate",
            "summary",
            "fraction of rollouts won; one without an outcome, in a batch in which others have one, counts as lost",
            'where an environment reports `info["success"]`',
        ),
        row(
            "fraction_of_optimal",
            "summary",
            "(reward - random) / (optimal - random), 1 for optimal play and 0 for random",
            'where an environment reports `info["random_reward"]` and `info["optimal_reward"]`',
        ),
        row(
            "info/…",
            "info",
            "mean of a number that the environment gives in `info` (of True and False: the fraction), as its last step "
            "gave it, over the rollouts that have it",
            "where an environment gives numbers in `info`",
        ),
        row("turns/mean", "summary", "mean turns of a rollout", "always"),
        row("turns/min", "lengths", "turns of the shortest rollout", "always"),
        row("turns/max", "lengths", "turns of the longest rollout", "always"),
        row("reward/turn_00", "by_turn", "mean reward of turn k, over the rollouts that had one", "always"),
        row(
            "reward/by_role/…",
            "by_role",
            "mean of what that role was paid in all; a rollout of several roles that does not say what each "
            "was paid is left out",
            "where an environment names roles (`_role`)",
        ),
        row(
            "win_rate/by_role/…",
            "by_role",
            'fraction of its rollouts that the role won: as `info["success"]` says where it is the rollout\'s '
            "only role or all roles were paid alike; else it was paid more than every other role",
            "where an environment names roles, and who won is known",
        ),
        row(
            "reward/by_environment/…",
            "by_environment",
            "mean final reward of the environment's rollouts, named by the row's `environment` (as `mix` "
            "writes it), else by its class, so that two configurations of one class need labels to be told "
            "apart",
            "in a batch of several environments",
        ),
        row(
            "win_rate/by_environment/…",
            "by_environment",
            "their `win_rate`",
            'in a batch of several environments, where it reports `info["success"]`',
        ),
        row(
            "fraction_of_optimal/by_environment/…",
            "by_environment",
            "their `fraction_of_optimal`",
            "in a batch of several environments, where it reports both references",
        ),
        row(
            "turns/by_environment/…",
            "by_environment",
            "their mean turns",
            "in a batch of several environments",
        ),
        row(
            "failed/by_environment/…",
            "by_environment",
            "fraction of them that failed",
            "in a batch of several environments",
        ),
        row("active_fraction/turn_00", "by_turn", "fraction of rollouts that had a turn k", "always"),
        row("stop/done", "stops", "fraction that the environment ended", "always"),
        row("stop/max_turns", "stops", "fraction that the limit of turns ended", "always"),
        row("stop/max_tokens", "stops", "fraction that a token budget ended", "always"),
        row("stop/invalid", "stops", "fraction that ended on invalid actions", "always"),
        row("failed", "summary", "fraction that failed", "always"),
        row(
            "rollouts/retried",
            "stops",
            "how often a failed rollout was played again, mean over all rollouts",
            "with `episode_retries`",
        ),
        row("invalid_turns", "stops", "fraction of turns whose action was invalid", "always"),
        row("exact", "stops", "fraction whose agent tokens are all as the agent gave them", "always"),
        row("tokens/agent_per_turn", "lengths", "mean agent tokens of a turn", "always"),
        row("tokens/environment_per_turn", "lengths", "mean number of all other tokens", "always"),
        row(
            "completions/mean_length",
            "lengths",
            "mean tokens after the first prompt, observations included (TRL's name)",
            "always",
        ),
        row("completions/min_length", "lengths", "those of the shortest rollout", "always"),
        row("completions/max_length", "lengths", "those of the longest rollout", "always"),
        row(
            "completions/clipped_ratio",
            "lengths",
            "fraction that a budget ended, of turns or of tokens (TRL's name)",
            "always",
        ),
        row("num_tokens", "lengths", "tokens seen in training so far", "always"),
    ),
    "Credit": (
        row(
            "advantage/turn_00",
            "by_turn",
            "mean advantage of turn k, as the estimator returned it",
            "in training",
        ),
        row("advantage_std/turn_00", "by_turn", "its standard deviation", "in training"),
        row(
            "advantage/by_role/…",
            "by_role",
            "mean advantage of the role's turns",
            "in training, where an environment names roles",
        ),
        row(
            "advantage_std/by_role/…",
            "by_role",
            "its standard deviation",
            "in training, where an environment names roles",
        ),
        row(
            "frac_reward_zero_std",
            "summary",
            "fraction of task groups (of several roles: of each role's) whose final rewards are all equal, "
            "before any is dropped: `grpo` and `rloo` get nothing from them",
            "in training",
        ),
        row(
            "step_groups/mean_size",
            "credit",
            "mean number of turns in the same state of a task",
            "in training, where the environment gives state keys",
        ),
        row(
            "step_groups/max_size",
            "credit",
            "the largest such group",
            "in training, where the environment gives state keys",
        ),
        row(
            "step_groups/singleton_fraction",
            "credit",
            "fraction of turns that are alone in their state: `gigpo` has no other turn to compare them with",
            "in training, where the environment gives state keys",
        ),
        row(
            "groups/kept",
            "credit",
            "fraction of task groups, of several roles of each role's, that are trained on",
            "in training",
        ),
        row(
            "groups/resampled",
            "credit",
            "rollouts that were replaced, per rollout of the batch; 2 means that each was replaced twice on average",
            'with `zero_variance_groups="resample"`',
        ),
        row(
            "curriculum/levels_known",
            "credit",
            "fraction of the levels that have enough results for a win rate",
            "with a [curriculum](mixing.md#a-curriculum)",
        ),
        row(
            "curriculum/levels_in_bounds",
            "credit",
            "fraction of the levels whose win rate lies within its bounds",
            "likewise",
        ),
        row(
            "value_loss",
            "credit",
            "½ (V - target)² over all targets, times the head's `loss_weight`",
            "with a value head",
        ),
    ),
    "Loss": (
        row("entropy/turn_00", "by_turn", "entropy of the policy in turn k", "in training"),
        row(
            "ratio/turn_00",
            "by_turn",
            "importance ratio of the weights in training to those that sampled, turn k; 1 where a batch is used once",
            "in training",
        ),
        row(
            "clip_ratio/turn_00",
            "by_turn",
            "fraction of turn k's tokens that are clipped",
            "with a loss that clips: not `sapo`, `vespo`",
        ),
        row(
            "effective_sample_size",
            "loss",
            "(Σ w)² / (N Σ w²) over rows, w the ratio of a whole row: 1 where all weigh alike, 1/N where one "
            "outweighs the rest",
            "in training",
        ),
        row("loss", "summary", "the loss, value head included (transformers')", "in training"),
        row(
            "grad_norm",
            "summary",
            "norm of the policy's gradient before it is clipped (transformers')",
            "in training",
        ),
        row("learning_rate", "summary", "the policy's (transformers')", "in training"),
        row("step_time", "loss", "seconds of an optimizer step (TRL's)", "in training"),
        row("epoch", "summary", "passes over the dataset (transformers')", "always"),
        row("entropy", "summary", "entropy over all agent tokens (TRL's)", "always"),
        row("policy_loss", "loss", "the loss without the entropy bonus (TRL's)", "with an entropy bonus"),
        row("entropy_coef", "loss", "weight of the bonus (TRL's)", "with an entropy bonus"),
        row("kl", "summary", "KL to the reference model (TRL's)", "with `beta`"),
        row(
            "clip_ratio/low_mean",
            "loss",
            "fraction of tokens clipped at the lower bound (TRL's)",
            "with a loss that clips, except `cispo`",
        ),
        row(
            "clip_ratio/high_mean",
            "loss",
            "fraction clipped at the upper bound (TRL's)",
            "with a loss that clips, except `cispo`",
        ),
        row(
            "clip_ratio/region_mean",
            "loss",
            "fraction clipped at either (TRL's)",
            "with a loss that clips, except `cispo`",
        ),
        row(
            "clip_ratio/low_min",
            "loss",
            "the row with the least clipped at the lower bound (TRL's)",
            "with a loss that clips, except `cispo`",
        ),
        row(
            "clip_ratio/high_max",
            "loss",
            "the row with the most clipped at the upper bound (TRL's)",
            "with a loss that clips, except `cispo`",
        ),
        row("cispo_clip_ratio", "loss", "fraction of tokens whose ratio is cut (TRL's)", "with `cispo`"),
        row("vespo/phi_seq_mean", "loss", "mean weight of a row (TRL's)", "with `vespo`"),
        row("aux_loss", "loss", "load balancing of a mixture of experts (TRL's)", "with such a model"),
    ),
    "Sampler": (
        row("sampling/sampling_logp_difference/mean", "sampler", "mean gap (TRL's name)"),
        row("sampling/sampling_logp_difference/max", "sampler", "largest gap (TRL's name)"),
        row(
            "sampling/importance_sampling_ratio/min",
            "sampler",
            "smallest ratio model / sampler, not clipped (TRL's name)",
        ),
        row("sampling/importance_sampling_ratio/mean", "sampler", "mean ratio (TRL's name)"),
        row("sampling/importance_sampling_ratio/max", "sampler", "largest ratio (TRL's name)"),
        row("sampling/kl/k1", "sampler", "estimate of KL(sampler, model): mean log ratio"),
        row("sampling/kl/k3", "sampler", "the same, never negative"),
        row(
            "sampling/effective_sample_size",
            "sampler",
            "as `effective_sample_size`, with the ratio model / sampler of each row",
        ),
        row(
            "sampling/effective_sample_size_of_tokens",
            "sampler",
            "the same over agent tokens, each with its own ratio",
        ),
        row(
            "sampling/cut_fraction",
            "sampler",
            "fraction of agent tokens whose weight the correction cuts or sets to 0; only with a correction",
        ),
    ),
    "Staleness": (
        row(
            "staleness/mean",
            "sampler",
            "updates since the weights that sampled a turn, mean over turns",
            "with `max_staleness`",
        ),
        row("staleness/max", "sampler", "of the oldest turn", "with `max_staleness`"),
        row(
            "staleness/mixed_rollouts",
            "sampler",
            "fraction of rollouts whose turns were sampled by more than one version of the weights",
            "with `max_staleness`",
        ),
        row("staleness/wait_s", "sampler", "seconds that training waited for the batch", "with `max_staleness`"),
    ),
    "Evaluation": (
        row("eval_win_rate", "summary", "fraction of all episodes won, where the environment reports it"),
        row("eval_win_rate_low", "summary", "lower end of its 95 % interval, tasks resampled"),
        row("eval_win_rate_high", "summary", "upper end"),
        row("eval_reward", "summary", "mean final reward of all episodes"),
        row("eval_reward_low", "summary", "lower end of its 95 % interval"),
        row("eval_reward_high", "summary", "upper end"),
        row("eval_turns", "lengths", "mean turns of all episodes"),
        row("eval_turns_low", "lengths", "lower end of its 95 % interval"),
        row("eval_turns_high", "lengths", "upper end"),
        row("eval_num_episodes", "summary", "episodes played"),
        row("eval_num_failed", "stops", "episodes that failed"),
    ),
}
