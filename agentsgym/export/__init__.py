"""Rollouts in the formats of others: Inspect, trackio, and examples for SFT, DPO and KTO."""
