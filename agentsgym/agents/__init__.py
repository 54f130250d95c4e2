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
    from agentsgym.agents.base import Agent, AsyncAgent
    from agentsgym.agents.direct import DirectOutputAgent
    from agentsgym.agents.openai import OpenAIAgent
    from agentsgym.agents.policy.agent import PolicyAgent
    from agentsgym.agents.policy.sampling import SamplingParams
    from agentsgym.agents.scripted import RandomAgent, ScriptedAgent

__all__ = [
    "Agent",
    "AsyncAgent",
    "DirectOutputAgent",
    "OpenAIAgent",
    "PolicyAgent",
    "RandomAgent",
    "SamplingParams",
    "ScriptedAgent",
]

__getattr__ = lazy(__name__)
