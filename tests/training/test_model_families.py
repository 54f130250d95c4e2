"""Some families of models are sampled and trained as the manual says; `make test-models` shows it of all of them."""

from pathlib import Path

import page
import pytest
import transformers
from exactness import outcome
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from zoo import FAMILIES, LEFT_OUT, type_of

FAST = [
    "deepseek_v32",
    "gemma3_text",
    "gemma4_text",
    "glm_moe_dsa selection of 64",
    "gpt_oss",
    "lfm2",
    "llama",
    "llama4_text",
    "phi3 LongRoPE",
]
FAST += ["phimoe", "qwen3_moe", "qwen3_vl"]


@pytest.mark.parametrize("family", FAST)
def test_a_family_is_as_exact_as_the_page_says(family: str, tmp_path: Path) -> None:
    if type_of(family) not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    assert outcome(family, tmp_path) == page.written()[family]


def test_every_family_of_transformers_is_played_or_left_out_with_a_reason() -> None:
    left_out = [name for names in LEFT_OUT.values() for name in names]
    played = {type_of(family) for family in FAMILIES}
    assert len(left_out) == len({*left_out})
    assert not played & {*left_out}
    new = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}.difference(played, left_out)
    if transformers.__version__ != page.version():
        pytest.skip(f"transformers {transformers.__version__} has families that nobody has looked at: {sorted(new)}")
    assert not new


def test_the_page_has_every_family_and_nothing_else() -> None:
    assert page.section() == page.rendered(page.written(), page.version())
    assert sorted(page.written()) == FAMILIES
