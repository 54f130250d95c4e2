"""What several environments share: engines in processes, text worlds, exact play, numbers in texts."""
