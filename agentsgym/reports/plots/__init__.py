"""Plots of training runs and rollouts in a common style, drawn without a display or pyplot's global state."""

from agentsgym.reports.plots.credit import credit_along, rollout_group
from agentsgym.reports.plots.curve import learning_curve
from agentsgym.reports.plots.style import Picture
from agentsgym.reports.plots.turns import by_turn, lengths

__all__ = ["Picture", "by_turn", "credit_along", "learning_curve", "lengths", "rollout_group"]
