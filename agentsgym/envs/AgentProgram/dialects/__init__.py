"""The APIs that programs speak, each as an object that parses requests and writes responses."""

from __future__ import annotations

from typing import Final

from agentsgym.envs.AgentProgram.dialects.completions import CHAT, COMPLETIONS
from agentsgym.envs.AgentProgram.dialects.messages import MESSAGES
from agentsgym.envs.AgentProgram.dialects.responses import RESPONSES
from agentsgym.envs.AgentProgram.dialects.shared import Dialect, answer_message, carried_over

__all__ = ["CHAT", "DIALECTS", "MESSAGES", "RESPONSES", "Dialect", "answer_message", "carried_over"]

DIALECTS: Final[tuple[Dialect, ...]] = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
"""Every API, one endpoint each."""
