"""Every family whose rows are packed where they begin alike is computed as each row alone is."""

import sys
from typing import Any

import pytest
from exactness import BOUND, RECURRENT_BOUND, ROUNDING, branching_rows, packed
from zoo import FAMILIES, TOKENIZER, build, type_of

from agentsgym.agents.policy.model import fixed_rope_length
from agentsgym.training.tensors import shared_prefix
from agentsgym.training.tensors.shared_prefix import can_share

PACKED = [name for name in FAMILIES if type_of(name) in shared_prefix.FAMILIES]
RECURRENT = [name for name in FAMILIES if type_of(name) in shared_prefix.RECURRENT]


def test_the_zoo_has_every_family_that_is_packed() -> None:
    assert {*map(type_of, PACKED)} == {*shared_prefix.FAMILIES}
    assert {type_of(name) for name in PACKED if can_share(build(name))} == {*shared_prefix.FAMILIES}


@pytest.mark.parametrize("family", PACKED)
def test_log_probabilities_and_gradients_are_those_of_each_row_alone(family: str) -> None:
    model = build(family)
    if not can_share(model):
        pytest.skip("this variant is never packed")
    longest = fixed_rope_length(model) or 10**9  # to which the trainer keeps rows, packed or not
    rows = [row[:longest] for row in branching_rows(len(TOKENIZER))]
    error = max(packed(model, rows))
    assert error < BOUND
    if error > BOUND / 10:
        assert max(packed(exact_model(family), rows)) < ROUNDING


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_layers_follow_the_tree_where_tree_recurrence_is_installed(family: str, checkpoints: bool) -> None:
    model, rows = build(family).train(), branching_rows(len(TOKENIZER))
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert can_share(model)
    assert max(packed(model, rows)) < RECURRENT_BOUND  # DeltaNet computes in float32 and rounds more


def test_every_recurrent_family_is_tried_and_none_is_packed_without_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {*map(type_of, RECURRENT)} == {*shared_prefix.RECURRENT}
    monkeypatch.setitem(sys.modules, "tree_recurrence", None)
    assert not any(can_share(build(name)) for name in RECURRENT)


def exact_model(family: str) -> Any:
    """In float64, which experts compute in a loop alone."""
    model = build(family).double()
    model.set_experts_implementation("eager")
    return model


def test_a_family_that_knows_its_window_by_the_mask_alone_is_not_packed() -> None:
    """The comparison finds what the list is for."""
    model = build("phimoe")
    assert not can_share(model)
    assert max(packed(model, branching_rows(len(TOKENIZER)))) > 0.1


def test_a_family_that_reads_the_mask_elsewhere_is_not_packed() -> None:
    model = build("nemotron")
    assert not can_share(model)
    with pytest.raises(RuntimeError, match="size"):
        packed(model, branching_rows(len(TOKENIZER)))
