"""Environments: the base class, its configuration, the registry, and one folder a game."""
