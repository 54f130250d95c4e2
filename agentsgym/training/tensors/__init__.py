"""Turn rollouts into padded tensors, with advantages and log-probabilities."""
