"""A griffe extension that converts our docstrings, with Sphinx references and inline doctests, for mkdocstrings."""

from __future__ import annotations

from typing import Any

import griffe

from manual_pages.texts import as_markdown


class SphinxReferences(griffe.Extension):
    """Rewrites every docstring of the package as Markdown before it is parsed into sections."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, a class, a function or an attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
