import os
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.seeding import derive_seed, episode_generator, fresh_seed

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)
)


@given(st.lists(json_values, max_size=4))
def test_a_derived_seed_is_a_63_bit_number_that_depends_on_its_parts_alone(parts: list[object]) -> None:
    seed = derive_seed(*parts)
    assert 0 <= seed < 2**63
    assert seed == derive_seed(*parts)
    assert seed != derive_seed(*parts, None)


def test_parts_do_not_run_together() -> None:
    assert len({derive_seed("ab", "c"), derive_seed("a", "bc"), derive_seed(["ab", "c"]), derive_seed("abc")}) == 4
    assert derive_seed(1, 11) != derive_seed(11, 1)
    assert derive_seed({"a": 1, "b": 2}) == derive_seed({"b": 2, "a": 1})


def test_a_derived_seed_does_not_change_between_processes() -> None:
    program = "from agentsgym.seeding import derive_seed; print(derive_seed('episode', 7, 0))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert outputs == {f"{derive_seed('episode', 7, 0)}\n"}


def test_a_part_that_is_no_json_value_is_refused() -> None:
    with pytest.raises(TypeError):
        derive_seed(object())


@given(st.integers(), st.integers(0, 10))
def test_an_episode_has_a_generator_of_its_own(seed: int, episode: int) -> None:
    draws = [episode_generator(seed, episode).random() for _ in range(2)]
    assert draws[0] == draws[1]
    assert episode_generator(seed, episode + 1).random() != draws[0]
    assert episode_generator(seed + 1, episode).random() != draws[0]


def test_nothing_global_is_read_or_changed() -> None:
    random.seed(3)
    state = random.getstate()
    fresh = [fresh_seed() for _ in range(20)]
    derive_seed("a")
    episode_generator(1, 2).random()
    assert random.getstate() == state
    assert len(set(fresh)) == 20
    assert all(0 <= seed < 2**62 for seed in fresh)
