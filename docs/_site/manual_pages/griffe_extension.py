"""Let mkdocstrings read our docstrings: their references are of Sphinx, and their doctests stand between sentences."""

from __future__ import annotations

from typing import Any

import griffe

from manual_pages.texts import as_markdown


class SphinxReferences(griffe.Extension):
    """Rewrites every docstring of the package as Markdown before it is read in sections."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, a class, a function or an attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
