"""What makes the files that the package ships or needs; not part of the package. Run from the repository root."""
