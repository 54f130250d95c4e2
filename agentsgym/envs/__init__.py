"""Environments: the base class, its configuration, dataset rows and their registry, and one folder an environment.

::

    base          MultistepEnv: the hooks that a class writes, and rollout, run_trial, generate
    contract      what a trial needs of an environment
    trial         one trial in play: observe, call the agent, record, step
    conversation  what is recorded, and the budget of tokens
    boundary      calls of what users wrote, and checks of what it returns
    starts        warnings about episodes that start wrongly
    subclass      what is checked and bound when a subclass is made
    config        the common keys of env_config
    rows/         dataset rows: class, configuration and task; which are trained on; a user's data
    registry      make, register, find
    mix           rows of several environments, in shares
    check/        the contract, checked by playing
    calls/        the schemas of tools, and calls: checked, and run within a limit of time
    references/   what random and optimal play earn
"""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy

if TYPE_CHECKING:
    from agentsgym.envs.ALFWorld import ALFWorldEnv
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.envs.check.run import check_env
    from agentsgym.envs.datasets.registry import make, register
    from agentsgym.envs.Gymnasium import GymnasiumEnv
    from agentsgym.envs.OpenEnv import OpenEnvEnv
    from agentsgym.envs.PriceList import PriceListEnv
    from agentsgym.envs.ReasoningEvals import ReasoningEvalsEnv
    from agentsgym.envs.ScienceWorld import ScienceWorldEnv
    from agentsgym.envs.Search import SearchEnv
    from agentsgym.envs.TextArena import TextArenaEnv
    from agentsgym.envs.TextWorld import TextWorldEnv
    from agentsgym.envs.Tools import ToolEnv
    from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv

__all__ = [
    "ALFWorldEnv",
    "GymnasiumEnv",
    "MultistepEnv",
    "OpenEnvEnv",
    "PriceListEnv",
    "ReasoningEvalsEnv",
    "ScienceWorldEnv",
    "SearchEnv",
    "TextArenaEnv",
    "TextWorldEnv",
    "ToolEnv",
    "TwentyQuestionsEnv",
    "check_env",
    "make",
    "register",
]

_HOMES = {
    "base": ("MultistepEnv",),
    "check.run": ("check_env",),
    "datasets.registry": ("make", "register"),
    "ALFWorld": ("ALFWorldEnv",),
    "Gymnasium": ("GymnasiumEnv",),
    "OpenEnv": ("OpenEnvEnv",),
    "PriceList": ("PriceListEnv",),
    "ReasoningEvals": ("ReasoningEvalsEnv",),
    "ScienceWorld": ("ScienceWorldEnv",),
    "Search": ("SearchEnv",),
    "TextArena": ("TextArenaEnv",),
    "TextWorld": ("TextWorldEnv",),
    "Tools": ("ToolEnv",),
    "TwentyQuestions": ("TwentyQuestionsEnv",),
}
__getattr__ = lazy(__name__, _HOMES)
