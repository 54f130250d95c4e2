"""Sample from a causal language model: one batch for all live episodes, with a cache that is kept across turns."""

from agentsgym.agents.policy.agent import PolicyAgent

__all__ = ["PolicyAgent"]
