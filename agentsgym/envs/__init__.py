"""Environments: the base class, its configuration, dataset rows and their registry, and one folder per environment.

::

    base          MultistepEnv: the hooks that a subclass defines, and rollout, run_trial, generate
    contract      the members of an environment that a trial uses
    play          many concurrent trials, with retries, or one by hand: reset and step
    finished      hooks for finished rollouts, such as judges
    trial         one live trial: its episodes and turns
    exchange      what passes between a trial and its environment: observe, record, step, reward
    opponents     who plays the roles that the agent does not
    conversation  the record of a conversation, and the token budget
    boundary      calls to user code, and checks of its results
    user_checks   checks of classes, arguments, tasks and starts of episodes, for each common mistake
    tool_schemas  the schemas of tools, and checks of their calls
    subclass      checks of a new subclass, and the arguments of its instances
    config        the common keys of env_config
    dataset_rows  the columns of a row: class, configuration and task
    spec          how an environment plugs in, readable without importing it
    players       the players that an environment provides, and their mean rewards (anchors)
    datasets/     rows to train on: options, sources, mixtures, the registry and names
    differences   what differs when recorded actions are played again
    check/        checks of the contract by playing
    shared/       parts of several environments: engines in processes, text worlds, numbers in texts
"""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy

if TYPE_CHECKING:
    from agentsgym.envs.AgentProgram import AgentProgramEnv as AgentProgramEnv
    from agentsgym.envs.ALFWorld import ALFWorldEnv as ALFWorldEnv
    from agentsgym.envs.base import MultistepEnv as MultistepEnv
    from agentsgym.envs.check.run import check_env as check_env
    from agentsgym.envs.datasets.environments import make as make
    from agentsgym.envs.datasets.environments import register as register
    from agentsgym.envs.Gymnasium import GymnasiumEnv as GymnasiumEnv
    from agentsgym.envs.OpenEnv import OpenEnvEnv as OpenEnvEnv
    from agentsgym.envs.OpenEnv import OpenEnvServer as OpenEnvServer
    from agentsgym.envs.OpenEnv import register_server as register_server
    from agentsgym.envs.PriceList import PriceListEnv as PriceListEnv
    from agentsgym.envs.ReasoningEvals import ReasoningEvalsEnv as ReasoningEvalsEnv
    from agentsgym.envs.ScienceWorld import ScienceWorldEnv as ScienceWorldEnv
    from agentsgym.envs.Search import SearchEnv as SearchEnv
    from agentsgym.envs.spec import EnvSpec as EnvSpec
    from agentsgym.envs.Terminal import TerminalEnv as TerminalEnv
    from agentsgym.envs.TextArena import TextArenaEnv as TextArenaEnv
    from agentsgym.envs.TextWorld import TextWorldEnv as TextWorldEnv
    from agentsgym.envs.Tools import McpServer as McpServer
    from agentsgym.envs.Tools import SessionTools as SessionTools
    from agentsgym.envs.Tools import ToolEnv as ToolEnv
    from agentsgym.envs.Tools import ToolResult as ToolResult
    from agentsgym.envs.Tools import register_tools as register_tools
    from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv as TwentyQuestionsEnv

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
}
__getattr__, __all__ = lazy(
    __name__,
    {
        ".AgentProgram": ["AgentProgramEnv"],
        ".ALFWorld": ["ALFWorldEnv"],
        ".base": ["MultistepEnv"],
        ".check.run": ["check_env"],
        ".datasets.environments": ["make", "register"],
        ".Gymnasium": ["GymnasiumEnv"],
        ".OpenEnv": ["OpenEnvEnv", "OpenEnvServer", "register_server"],
        ".PriceList": ["PriceListEnv"],
        ".ReasoningEvals": ["ReasoningEvalsEnv"],
        ".ScienceWorld": ["ScienceWorldEnv"],
        ".Search": ["SearchEnv"],
        ".spec": ["EnvSpec"],
        ".Terminal": ["TerminalEnv"],
        ".TextArena": ["TextArenaEnv"],
        ".TextWorld": ["TextWorldEnv"],
        ".Tools": ["McpServer", "SessionTools", "ToolEnv", "ToolResult", "register_tools"],
        ".TwentyQuestions": ["TwentyQuestionsEnv"],
    },
)
