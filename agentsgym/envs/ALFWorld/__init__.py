"""ALFWorld: household tasks as text."""
