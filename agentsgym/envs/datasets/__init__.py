"""Datasets of tasks: their options and sources, the registry, mixtures, and what a name means."""
