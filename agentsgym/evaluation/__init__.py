"""Measure how well an agent plays: metrics over many episodes, with confidence intervals."""

from agentsgym.evaluation.run import evaluate
from agentsgym.evaluation.transcripts import render_transcript
from agentsgym.statistics.metrics import Estimate, Evaluation, summarize

__all__ = ["Estimate", "Evaluation", "evaluate", "render_transcript", "summarize"]
