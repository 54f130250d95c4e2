"""Summarize finished rollouts as estimates with confidence intervals, in training and evaluation."""
