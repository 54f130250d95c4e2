"""Rollouts as examples for SFT, DPO and KTO."""
