"""The life of a run: checkpoints, resuming, signals and its end."""
