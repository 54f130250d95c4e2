"""Presentation of results: plain-text ``tables``, ``plots``, and HTML and data frames for notebooks."""
