"""Names that earlier versions had, and what to use instead.

:func:`agentsgym.errors.did_you_mean` looks unknown settings, keys, estimators and paths up here; the command line its
commands; and imports their names and modules.
"""

from __future__ import annotations

from collections.abc import Mapping

_FORKS = "training no longer forks rollouts (removed in 0.3.0, since forks cost as many tokens as they saved)"
_PLOTS = "plots other than learning_curve were removed in 0.3.0: look at stored rollouts with `agentsgym view`"
_WAITER = "since 0.3.0, WaiterEnv is an example of the repository: use examples/waiter.py:WaiterEnv"
_REFERENCE = (
    "optimal play for Bandit, Mastermind and TowerOfHanoi was removed in 0.3.0: compare with the agent 'random', or "
    "play GuessTheNumber, TicTacToe, KuhnPoker or FrozenLake"
)
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
    "agentsgym push": "environments are uploaded with `hf upload USER/NAME FOLDER` (push was removed in 0.3.0)",
    "agentsgym pull": (
        "environments are downloaded with `hf download USER/NAME --local-dir FOLDER` (pull was removed in 0.3.0)"
    ),
    "agentsgym audit": "stored rollouts are checked with `agentsgym check STORE` (audit was removed in 0.3.0)",
    "agentsgym judge": "the command judge was removed in 0.3.0: compare Judge.judge_episode(…).values with labels in "
    "Python, as docs/judges.md shows",
    **dict.fromkeys(("Waiter", "WaiterEnv", "agentsgym.envs.Waiter", "agentsgym.envs.Waiter.WaiterEnv"), _WAITER),
    "agentsgym.training.imitate": "import tiny_imitation_config from agentsgym.training (moved in 0.3.0)",
    **dict.fromkeys(("reference Bandit", "reference Mastermind", "reference TowerOfHanoi"), _REFERENCE),
}


class RemovedModules:
    """The last finder of modules: the import of one that an earlier version had ends with what to use instead."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Find no module.

        Raises:
            ModuleNotFoundError: An earlier version had it.
        """
        if name in REMOVED:
            raise ModuleNotFoundError(f"there is no module {name!r}: {REMOVED[name]}", name=name)
