"""Scripts that generate or check the package's data files; not part of the package. Run from the repository root."""
