"""Grouped heads attend without copies of what is cached, to the same result, and the model is left as it was."""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_sessions import Session, greedy, greedy_reference, model_of, new_model, play
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.integrations import sdpa_attention

from agentsgym.agents.policy.attention import extended_sdpa, grouped_attention, has_plain_attention

PLAIN = cast("Callable[..., Any]", AttentionInterface()["sdpa"])

PACKS_SINGLE_QUERIES = hasattr(sdpa_attention, "pack_gqa")  # from transformers 5.23 on


@contextmanager
def attended(monkeypatch: pytest.MonkeyPatch) -> Generator[list[tuple[int, int, int]]]:
    """How many heads of queries and of keys torch gets in each call, and how many queries."""
    calls: list[tuple[int, int, int]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def note(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append((query.shape[1], key.shape[1], query.shape[2]))
        return attend(query, key, value, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
        yield calls


def layer(num_repeats: int) -> nn.Module:
    module: Any = nn.Module()
    module.num_key_value_groups = num_repeats
    return module


@given(
    heads=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(0, 12)),
    widths=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    scaling=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 1000),
)
def test_it_attends_as_sdpa_does(
    heads: tuple[int, int], sizes: tuple[int, int, int], widths: tuple[int, int], scaling: float | None, seed: int
) -> None:
    (num_groups, num_repeats), (num_rows, num_queries, num_cached) = heads, sizes
    draws = torch.Generator().manual_seed(seed)
    num_columns = num_cached + num_queries
    query = torch.randn(num_rows, num_groups * num_repeats, num_queries, widths[0], generator=draws)
    key, value = (torch.randn(num_rows, num_groups, num_columns, width, generator=draws) for width in widths)
    mask = torch.ones(num_queries, num_columns, dtype=torch.bool).tril(num_cached).repeat(num_rows, 1, 1, 1)
    for row in mask:
        row[..., : int(torch.randint(num_cached + 1, (), generator=draws))] = False  # padding on the left
    inputs = layer(num_repeats), query, key, value, mask
    given, weights = extended_sdpa(*inputs, scaling=scaling, is_causal=True)
    wanted, _ = PLAIN(*inputs, scaling=scaling, is_causal=True)
    assert weights is None
    assert given.is_contiguous()
    torch.testing.assert_close(given, wanted)


@pytest.mark.parametrize("bias", [False, True])
def test_what_is_no_masked_attention_of_groups_is_left_to_sdpa(bias: bool) -> None:
    query, (key, value) = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 2, 5, 8)
    mask = torch.rand(2, 1, 5, 5) < 0.9 if bias else None
    options = {"position_bias": torch.randn(2, 4, 5, 5)} if bias else {}
    given, _ = extended_sdpa(layer(2), query, key, value, mask, **options)
    assert torch.equal(given, PLAIN(layer(2), query, key, value, mask, **options)[0])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "qwen3_next"])
def test_cached_keys_are_not_copied_to_all_heads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = new_model(kind)
    agent, sessions = greedy(model), [Session(n) for n in range(3)]
    play(agent, sessions, 5)
    with attended(monkeypatch) as calls:
        play(agent, sessions, 5)
    assert {num_keys for _, num_keys, num_queries in calls if num_queries > 1 or PACKS_SINGLE_QUERIES} == {2}
    assert max(num_queries for _, _, num_queries in calls) > 2  # a chunk, its groups one after the other
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's own
def test_adapters_are_found_beneath(monkeypatch: pytest.MonkeyPatch) -> None:
    peft: Any = pytest.importorskip("peft")
    model = peft.get_peft_model(new_model("llama"), peft.LoraConfig(r=2, target_modules="all-linear"))
    agent, sessions = greedy(model), [Session(n) for n in range(3)]
    play(agent, sessions, 5)
    with attended(monkeypatch) as calls:
        play(agent, sessions, 5)
    assert {num_keys for _, num_keys, num_queries in calls if num_queries > 1 or PACKS_SINGLE_QUERIES} == {2}
    assert model.get_base_model().config._attn_implementation == "sdpa"


def test_what_a_pass_that_fails_leaves() -> None:
    model: Any = new_model("llama")
    with pytest.raises(IndexError), grouped_attention(model):
        model(torch.tensor([[10**6]]))
    assert model.config._attn_implementation == "sdpa"


def test_an_implementation_that_is_exchanged_later_is_respected() -> None:
    model: Any = new_model("llama")
    agent, sessions = greedy(model), [Session(n) for n in range(3)]
    play(agent, sessions, 5)
    model.set_attn_implementation("eager")
    play(agent, sessions, 5)
    assert model.config._attn_implementation == "eager"
    for session in sessions:
        assert all(output == greedy_reference(model, prompt, 5) for prompt, output in session.turns)


class OwnForward(LlamaForCausalLM):
    """A model of another module, whose functions are not known to be those of transformers."""


def test_only_plain_sdpa_is_touched() -> None:
    assert has_plain_attention(model_of("llama"))
    for kind in ("llama-eager", "gpt_oss", "rwkv", "deepseek_v32"):
        assert not has_plain_attention(model_of(kind))
    config: Any = model_of("llama").config
    assert not has_plain_attention(OwnForward(config))


def test_a_model_that_cannot_do_without_its_own_is_run_with_that(caplog: pytest.LogCaptureFixture) -> None:
    model = new_model("llama")

    def refuse(module: Any, _: Any) -> None:
        if module.config._attn_implementation != "sdpa":
            raise KeyError(module.config._attn_implementation)

    model.register_forward_pre_hook(refuse)
    sessions = [Session(n) for n in range(3)]
    agent = greedy(model)
    for _ in range(2):
        play(agent, sessions, 5)
    assert not [record for record in caplog.records if record.name.startswith("agentsgym")]
    for session in sessions:
        assert all(output == greedy_reference(model, prompt, 5) for prompt, output in session.turns)


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["llama", "bamba"])
def test_the_operators_of_a_turn_do_not_grow_with_its_rows(kind: str) -> None:
    counts: list[Counter[str]] = []
    for num_sessions in (4, 12):
        sessions, agent = [Session(n % 4) for n in range(num_sessions)], greedy(new_model(kind))
        agent.stop_token_ids = frozenset()
        for limit in (2, 5):
            with Operators() as operators:
                play(agent, sessions, limit)
        counts.append(operators.counts)
    assert counts[0] == counts[1]
    # Reading waits for the device. Transformers reads its mask when several tokens run, and in hybrid models.
    assert kind != "llama" or counts[0]["_local_scalar_dense"] <= 2
