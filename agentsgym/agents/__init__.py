"""Agents: whatever answers a turn, from a fixed script to the model in training.

``base`` says what an agent is; ``scripted`` holds players that need no model; ``direct`` wraps a function or a
transformers model.
"""
