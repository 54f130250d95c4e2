"""Measure how well an agent plays: many episodes, a few numbers, and how far these can be trusted."""

from agentsgym.evaluation.run import evaluate
from agentsgym.evaluation.transcripts import render_transcript
from agentsgym.statistics.metrics import Estimate, Evaluation, summarize

__all__ = ["Estimate", "Evaluation", "evaluate", "render_transcript", "summarize"]
