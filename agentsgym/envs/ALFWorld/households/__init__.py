"""Households made here, in the files that ALFWorld's own games come in, for play, training and tests offline."""

from agentsgym.envs.ALFWorld.households.generate import SPLITS, GeneratedHouseholds, generate_households
from agentsgym.envs.ALFWorld.households.plans import TASK_TYPES
from agentsgym.envs.ALFWorld.households.rooms import SIZES

__all__ = ["SIZES", "SPLITS", "TASK_TYPES", "GeneratedHouseholds", "generate_households"]
