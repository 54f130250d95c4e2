"""Shared parts of the text worlds: parsing of commands, and players that follow a walkthrough."""
