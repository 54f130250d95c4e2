"""Environments: the base class, its configuration, dataset rows and their registry, and one folder an environment.

::

    base          MultistepEnv: the hooks that a class writes, and rollout, run_trial, generate
    contract      what a trial needs of an environment
    trial         one trial in play: observe, call the agent, record, step
    conversation  what is recorded, and the budget of tokens
    result_checks what environments and agents return, checked
    starts        warnings about episodes that start wrongly
    subclass      what is checked and bound when a subclass is made
    config        the common keys of env_config
    rows          dataset rows: class, configuration and task
    registry      make, register, find
"""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy

if TYPE_CHECKING:
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.envs.registry import make, register
    from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv

__all__ = ["MultistepEnv", "TwentyQuestionsEnv", "make", "register"]

_HOMES = {"base": ("MultistepEnv",), "registry": ("make", "register"), "TwentyQuestions": ("TwentyQuestionsEnv",)}
__getattr__ = lazy(__name__, _HOMES)
