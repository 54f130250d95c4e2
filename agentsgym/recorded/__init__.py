"""Trajectories from conversations recorded elsewhere: chat messages, and OpenEnv's training traces."""
