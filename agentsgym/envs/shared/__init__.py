"""Code shared by several environments: engine processes, text worlds, exact play, parsing of numbers."""
