"""Turn dataset rows into finished rollouts."""
