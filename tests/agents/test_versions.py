"""What differs between versions of transformers, on stand-ins for the versions that are not installed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from agentsgym.agents.policy.versions import recompute_by_default

NEW, OLD = "activation_checkpointing", "gradient_checkpointing"


@pytest.mark.parametrize("settings", [{OLD: None}, {NEW: None, OLD: None}], ids=["before 5.23", "from 5.23 on"])
@pytest.mark.parametrize("is_recomputed", [True, False])
def test_recomputation_is_set_under_the_name_of_the_version(
    settings: dict[str, bool | None], *, is_recomputed: bool
) -> None:
    args = SimpleNamespace(**settings)
    recompute_by_default(args, is_recomputed=is_recomputed)
    assert vars(args) == {**settings, next(iter(settings)): is_recomputed}


@pytest.mark.parametrize("settings", [{OLD: False}, {NEW: None, OLD: False}, {NEW: False, OLD: None}])
def test_a_users_choice_is_kept_under_either_name(settings: dict[str, bool | None]) -> None:
    args = SimpleNamespace(**settings)
    recompute_by_default(args, is_recomputed=True)
    assert vars(args) == settings
