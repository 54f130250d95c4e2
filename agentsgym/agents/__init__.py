"""Agents, which choose actions.

::

    base        the base classes Agent and AsyncAgent
    scripted    fixed or random actions
    direct      the output of a function, a model or an engine
    openai      any OpenAI-compatible server
    calls       calls outside of episodes, as of judges: many at once or in batches, retried, and with a cache
    policy/     the policy in training, on transformers (requires torch, as does vllm/)
    vllm/       the policy in training, on vLLM: an engine in this process, or servers
"""

from typing import TYPE_CHECKING

from agentsgym._lazy import lazy

if TYPE_CHECKING:
    from agentsgym.agents.base import Agent as Agent
    from agentsgym.agents.base import AsyncAgent as AsyncAgent
    from agentsgym.agents.direct import DirectOutputAgent as DirectOutputAgent
    from agentsgym.agents.openai import OpenAIAgent as OpenAIAgent
    from agentsgym.agents.policy.agent import PolicyAgent as PolicyAgent
    from agentsgym.agents.policy.sampling import SamplingParams as SamplingParams
    from agentsgym.agents.scripted import RandomAgent as RandomAgent
    from agentsgym.agents.scripted import ScriptedAgent as ScriptedAgent

__getattr__, __all__ = lazy(
    __name__,
    {
        ".base": ["Agent", "AsyncAgent"],
        ".direct": ["DirectOutputAgent"],
        ".openai": ["OpenAIAgent"],
        ".policy.agent": ["PolicyAgent"],
        ".policy.sampling": ["SamplingParams"],
        ".scripted": ["RandomAgent", "ScriptedAgent"],
    },
)
