"""Show a run: which metrics go to trackers and the terminal, and whole conversations in both."""
