"""Convert trajectories to training rows: padding and layouts."""
