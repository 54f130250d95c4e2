"""Rollouts in other tools' formats: Inspect, trackio, and examples for SFT, DPO and KTO."""
