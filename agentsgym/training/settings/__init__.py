"""The settings of a run in parts that belong together, and how they are declared."""
