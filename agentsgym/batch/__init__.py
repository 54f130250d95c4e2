"""From trajectories to the rows that are trained: padding and layouts."""
