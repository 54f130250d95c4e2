"""Plots of training runs and rollouts, drawn without a display and without pyplot's global state, in one style."""

from agentsgym.reports.plots.credit import credit_along, rollout_group
from agentsgym.reports.plots.curve import learning_curve, moving_average, spread
from agentsgym.reports.plots.style import Picture
from agentsgym.reports.plots.turns import by_turn, lengths

__all__ = [
    "Picture",
    "by_turn",
    "credit_along",
    "learning_curve",
    "lengths",
    "moving_average",
    "rollout_group",
    "spread",
]
