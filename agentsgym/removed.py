"""Names that earlier versions had, and what to use instead.

:func:`agentsgym.errors.did_you_mean` looks unknown settings, keys, estimators and paths up here; the command line its
commands, and the packages their imports.
"""

from __future__ import annotations

from collections.abc import Mapping

_FORKS = "training no longer forks rollouts (removed in 0.3.0, since forks cost as many tokens as they saved)"
_PLOTS = "plots other than learning_curve were removed in 0.3.0: look at stored rollouts with `agentsgym view`"
# Name, as a user types it (with its kind in front where the bare word could mean something else), to a sentence without
# its period.
REMOVED: Mapping[str, str] = {
    "fork_budget": f"{_FORKS}; leave fork_budget out",
    "fork_kwargs": f"{_FORKS}; leave fork_kwargs out",
    "estimator tree": f"{_FORKS}; use 'return_to_go' or 'mt_grpo'",
    "trait owners": f"{_FORKS}; leave it out",
    "export inspect": "export to Inspect was removed in 0.3.0: view rollouts with `agentsgym view`, or use --to jsonl",
    "export trackio": "export to trackio was removed in 0.3.0: view stored rollouts with `agentsgym view`, or train "
    "with report_to='trackio'",
    "plot by_turn": f"{_PLOTS}, or average the rows of to_pandas(by='turn')",
    "plot credit_along": f"{_PLOTS}, or use agentsgym.reports.html.trajectory_html",
    "plot lengths": f"{_PLOTS}, or plot the columns of to_pandas()",
    "plot rollout_group": f"{_PLOTS}, or use agentsgym.reports.html.rollouts_html",
    "from_training_trace": "reading OpenEnv's TrainingTrace was removed in 0.3.0: use Trajectory.from_messages, or "
    "Trajectory(token_ids=…, turns=…, logprobs=…) to keep the sampled tokens",
}
