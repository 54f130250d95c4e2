"""The pages of the site that are made when it is built: from the library's own declarations, and from other files."""
