"""Sample the policy in training on each backend, and train a value head beside it."""
