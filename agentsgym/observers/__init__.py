"""Store and show what a trainer plays: rollout stores, learning curves, and conversations in terminals and trackers."""
