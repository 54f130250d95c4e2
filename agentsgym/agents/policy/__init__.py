"""Sample from a causal language model: one batch for all live episodes, its key/value cache kept across turns."""

from agentsgym.agents.policy.agent import PolicyAgent

__all__ = ["PolicyAgent"]
