"""Shared parts of the text worlds: their base class, and players that follow a walkthrough."""
