"""Agents that are programs: any program that calls an OpenAI-compatible endpoint is played and trained."""
