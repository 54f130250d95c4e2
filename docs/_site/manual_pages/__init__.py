"""Generation of site pages from the library's declarations and from files of the repository."""
