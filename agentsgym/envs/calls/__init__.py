"""Calls of tools: the schemas that agents are shown, calls held to them, and calls run within a limit of time."""
