"""What random and optimal play are worth, and how to compute it."""
