"""What happens to a run: checkpoints, resuming, signals, NaN and infinity, and its end."""
