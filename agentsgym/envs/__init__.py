"""Environments: the base class, its configuration, dataset rows and their registry, and one folder per environment.

::

    base          MultistepEnv: the hooks that a subclass defines, and rollout, run_trial, generate
    contract      the members of an environment that a trial uses
    play          many concurrent trials, with retries
    finished      hooks for finished rollouts, such as judges
    trial         one live trial: observe, call the agent, record, step
    by_hand       one episode, action by action: reset and step
    conversation  the record of a conversation, and the token budget
    boundary      calls to user code, and checks of its results
    starts        checks of tasks, and warnings about wrong starts of episodes
    subclass      checks of a new subclass, and the arguments of its instances
    config        the common keys of env_config
    dataset_rows  the columns of a row: class, configuration and task
    spec          how an environment plugs in, readable without importing it
    players       the players that an environment provides, and their mean rewards (anchors)
    datasets/     rows to train on: options, sources, mixtures, the registry and names
    check/        checks of the contract by playing
    calls/        the schemas of tools, and checks of tool calls
    shared/       parts of several environments: engines in processes, text worlds, exact play, numbers in texts
"""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy

if TYPE_CHECKING:
    from agentsgym.envs.AgentProgram import AgentProgramEnv
    from agentsgym.envs.ALFWorld import ALFWorldEnv
    from agentsgym.envs.base import MultistepEnv
    from agentsgym.envs.check.run import check_env
    from agentsgym.envs.datasets.registry import make, register
    from agentsgym.envs.Gymnasium import GymnasiumEnv
    from agentsgym.envs.OpenEnv import OpenEnvEnv, OpenEnvServer, register_server
    from agentsgym.envs.PriceList import PriceListEnv
    from agentsgym.envs.ReasoningEvals import ReasoningEvalsEnv
    from agentsgym.envs.ScienceWorld import ScienceWorldEnv
    from agentsgym.envs.Search import SearchEnv
    from agentsgym.envs.spec import EnvSpec
    from agentsgym.envs.Terminal import TerminalEnv
    from agentsgym.envs.TextArena import TextArenaEnv
    from agentsgym.envs.TextWorld import TextWorldEnv
    from agentsgym.envs.Tools import McpServer, SessionTools, ToolEnv, ToolResult, register_tools
    from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
    from agentsgym.envs.Waiter import WaiterEnv

__all__ = [
    "ALFWorldEnv",
    "AgentProgramEnv",
    "EnvSpec",
    "GymnasiumEnv",
    "McpServer",
    "MultistepEnv",
    "OpenEnvEnv",
    "OpenEnvServer",
    "PriceListEnv",
    "ReasoningEvalsEnv",
    "ScienceWorldEnv",
    "SearchEnv",
    "SessionTools",
    "TerminalEnv",
    "TextArenaEnv",
    "TextWorldEnv",
    "ToolEnv",
    "ToolResult",
    "TwentyQuestionsEnv",
    "WaiterEnv",
    "check_env",
    "make",
    "register",
    "register_server",
    "register_tools",
]

#: The packaged environments: name (of the folder, which defines ``SPEC``) and class.
PACKAGED = {
    "ALFWorld": "agentsgym.envs.ALFWorld.ALFWorldEnv",
    "AgentProgram": "agentsgym.envs.AgentProgram.AgentProgramEnv",
    "Gymnasium": "agentsgym.envs.Gymnasium.GymnasiumEnv",
    "OpenEnv": "agentsgym.envs.OpenEnv.OpenEnvEnv",
    "PriceList": "agentsgym.envs.PriceList.PriceListEnv",
    "ReasoningEvals": "agentsgym.envs.ReasoningEvals.ReasoningEvalsEnv",
    "ScienceWorld": "agentsgym.envs.ScienceWorld.ScienceWorldEnv",
    "Search": "agentsgym.envs.Search.SearchEnv",
    "Terminal": "agentsgym.envs.Terminal.TerminalEnv",
    "TextArena": "agentsgym.envs.TextArena.TextArenaEnv",
    "TextWorld": "agentsgym.envs.TextWorld.TextWorldEnv",
    "Tools": "agentsgym.envs.Tools.ToolEnv",
    "TwentyQuestions": "agentsgym.envs.TwentyQuestions.TwentyQuestionsEnv",
    "Waiter": "agentsgym.envs.Waiter.WaiterEnv",
}
__getattr__ = lazy(__name__)
