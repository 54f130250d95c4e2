"""Trajectories from chat conversations recorded elsewhere."""
