"""Keep and show what a trainer plays: a store, conversations in the terminal and in trackers."""
