"""Trajectories from conversations recorded elsewhere: chat messages, and OpenEnv's training traces."""

from agentsgym.recorded.messages import trajectories_from_messages, trajectory_from_messages
from agentsgym.recorded.training_trace import trajectory_from_training_trace

__all__ = ["trajectories_from_messages", "trajectory_from_messages", "trajectory_from_training_trace"]
