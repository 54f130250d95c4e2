"""Every family of transformers that the zoo has is sampled and trained as the manual says."""

from pathlib import Path

import page
import pytest
import transformers
from exactness import outcome
from zoo import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_as_exact_as_the_page_says(family: str, tmp_path: Path) -> None:
    assert outcome(family, tmp_path) == page.written()[family]


def test_the_page_names_this_version_of_transformers() -> None:
    assert page.version() == transformers.__version__
