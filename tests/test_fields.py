"""Checks of single settings, and the sentence of those that fail."""

from typing import Any

import pytest

from agentsgym.errors import ConfigError
from agentsgym.fields import is_int, is_positive_number, or_none, require


@pytest.mark.parametrize("value", [1, 0.001, 1e300, 2**63 - 1])
def test_a_positive_number_is_above_zero(value: Any) -> None:
    assert is_positive_number(value)


@pytest.mark.parametrize("value", [0, 0.0, -1, True, "1", None, float("nan"), float("inf"), 2**63, 10**400])
def test_what_is_no_positive_number(value: Any) -> None:
    assert not is_positive_number(value)


def test_a_setting_that_is_not_valid_is_named_with_what_was_wanted_and_given() -> None:
    require("num_workers", 1, is_int(1), "a positive int")
    require("max_concurrent", None, or_none(is_int(1)), "a positive int or None")
    with pytest.raises(ConfigError) as raised:
        require("max_concurrent", 0, or_none(is_int(1)), "a positive int or None")
    assert str(raised.value) == "max_concurrent must be a positive int or None, got 0"
