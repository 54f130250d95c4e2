"""Compute what is logged: metrics of rollouts, and of the loss turn by turn."""
