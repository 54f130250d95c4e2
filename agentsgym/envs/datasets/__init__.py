"""Datasets of tasks: options, sources, mixtures, the registry of environments, and the lookup of environment names."""
