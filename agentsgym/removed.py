"""Names that earlier versions had, and what to use instead.

:func:`agentsgym.errors.did_you_mean` looks unknown settings, keys, estimators and paths up here; the command line its
commands, and the packages their imports.
"""

from __future__ import annotations

from collections.abc import Mapping

_FORKS = "training no longer forks rollouts (removed in 0.3.0, since forks cost as many tokens as they saved)"
# Name, as a user types it (with its kind in front where the bare word could mean something else), to a sentence without
# its period.
REMOVED: Mapping[str, str] = {
    "fork_budget": f"{_FORKS}; leave fork_budget out",
    "fork_kwargs": f"{_FORKS}; leave fork_kwargs out",
    "estimator tree": f"{_FORKS}; use 'return_to_go' or 'mt_grpo'",
    "trait owners": f"{_FORKS}; leave it out",
}
