"""Summarize finished rollouts in estimates with intervals, in training as in an evaluation."""
