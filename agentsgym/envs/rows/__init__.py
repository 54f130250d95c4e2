"""Dataset rows: what a row holds, the options that make a dataset of tasks, and the sources of a user's data."""
