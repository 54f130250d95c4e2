"""Generated households in the format of ALFWorld's own games, for play, training and tests offline."""

from tools.households.generate import SPLITS, GeneratedHouseholds, generate_households
from tools.households.plans import TASK_TYPES
from tools.households.rooms import SIZES

__all__ = ["SIZES", "SPLITS", "TASK_TYPES", "GeneratedHouseholds", "generate_households"]
