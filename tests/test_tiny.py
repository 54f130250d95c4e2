"""The embedded policy: exact round trips, a template that cuts at control tokens, weights that load again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, TwentyQuestionsEnv
from agentsgym.errors import ConfigError
from agentsgym.tiny import call_text, tiny_model, tiny_policy, tiny_tokenizer

TEXTS = [
    "You have 7 turns. Guess the object: clock, Dog,\n- ice-cream\n\t[clock]  (twice)",
    "Is it a clock?",
    "Yes.",
    "I don't know.",
    "Can't you say “déjà vu”?!",
]
CONVERSATION = [
    {"role": "system", "content": "I don't know."},
    {"role": "user", "content": TEXTS[0]},
    {"role": "assistant", "content": "Is it a clock?"},
    {"role": "user", "content": "Yes."},
]
CONTROL = ["<|pad|>", "<|unknown|>", "<|end|>", "<|assistant|>"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_vocabulary_text_decodes_to_itself_without_unknown_tokens(text: str) -> None:
    tokenizer = tiny_tokenizer(TEXTS)
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


@given(st.lists(st.text(), min_size=1).filter(any))
def test_any_text_at_all_survives(texts: list[str]) -> None:
    tokenizer = tiny_tokenizer(texts)
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if not any(control in text for control in CONTROL):
            assert tokenizer.decode(ids) == text
            assert tokenizer.unk_token_id not in ids


def test_words_keep_their_marks_and_their_case() -> None:
    tokenizer = tiny_tokenizer(TEXTS)
    assert tokenizer.tokenize("Is it a clock?") == ["Is", " it", " a clock?"]
    assert tokenizer.tokenize("[clock] Can't") == ["[", "clock]", "<|unknown|>"]
    assert tokenizer.tokenize("is it") == ["<|unknown|>", " it"]


def test_an_article_belongs_to_its_word() -> None:
    config = {"objects": list(DEMO_OBJECTS), "properties": list(DEMO_PROPERTIES), "system_prompt": ""}
    vocabulary = tiny_tokenizer(TwentyQuestionsEnv(env_config=config).vocabulary_texts()).get_vocab()
    assert {" an airplane?", " an octopus?", " a clock?"} < vocabulary.keys()
    assert {" a", " an", " airplane?", " a airplane?", " an clock?"}.isdisjoint(vocabulary)
    tokenizer = tiny_tokenizer(["a", "an apple a day", "banana a-b [a] plan b"])
    assert tokenizer.tokenize("an apple a day") == ["an apple", " a day"]
    assert tokenizer.tokenize("banana a-b [a] plan b") == ["banana", " a-b", " [", "a]", " plan", " b"]


def test_the_order_of_texts_does_not_matter() -> None:
    assert tiny_tokenizer(TEXTS).get_vocab() == tiny_tokenizer(reversed(TEXTS)).get_vocab()


def test_control_tokens_are_special_and_distinct() -> None:
    tokenizer = tiny_tokenizer(TEXTS)
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    assert special == set(CONTROL) == set(tokenizer.all_special_tokens)
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) == len(tokenizer.get_vocab()) == max(tokenizer.get_vocab().values()) + 1


def test_the_full_render_equals_its_pieces_around_control_tokens() -> None:
    tokenizer = tiny_tokenizer(TEXTS)

    def piece(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    assistant, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    rendered = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, return_dict=False)
    assert rendered == [
        *[*piece("I don't know."), end, *piece(TEXTS[0])],
        *[assistant, *piece("Is it a clock?"), end, *piece("Yes."), assistant],
    ]


def test_a_turn_costs_two_control_tokens() -> None:
    tokenizer = tiny_tokenizer(TEXTS)
    turn = [{"role": "assistant", "content": ""}, {"role": "user", "content": ""}]

    def length(messages: list[dict[str, str]]) -> int:
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    assert length(CONVERSATION + turn) - length(CONVERSATION) == 2


def test_control_words_in_a_message_can_be_read_as_plain_text() -> None:
    raw = tiny_tokenizer([*TEXTS, "<|end|>"]).backend_tokenizer
    raw.encode_special_tokens = True
    assert raw.encode("<|end|>").tokens == ["<|", "end|>"]


def test_saved_policy_loads_with_the_auto_classes_and_gives_equal_logits(tmp_path: Path) -> None:
    model, tokenizer = tiny_policy(TEXTS, seed=3)
    model.eval().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.added_tokens_decoder == tokenizer.added_tokens_decoder
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    batch = loaded.apply_chat_template(CONVERSATION, return_tensors="pt", add_generation_prompt=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert loaded.decode(loaded("Is it a clock?").input_ids) == "Is it a clock?"
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**batch).logits, model(**batch).logits, rtol=0, atol=0)
    assert again.generation_config.eos_token_id == tokenizer.eos_token_id
    assert again.generation_config.top_k == 0


def test_generation_stops_at_the_end_of_turn() -> None:
    model, tokenizer = tiny_policy(TEXTS)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.eos_token_id] = model.model.norm.weight  # far ahead of all others
        model.model.embed_tokens.weight.abs_().mul_(100)
    batch = tokenizer.apply_chat_template(CONVERSATION, return_tensors="pt", add_generation_prompt=True)
    answer = model.eval().generate(**batch, do_sample=False, max_new_tokens=5)[0, batch["input_ids"].shape[1] :]
    assert answer.tolist() == [tokenizer.eos_token_id]


def test_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    tokenizer = tiny_tokenizer(TEXTS)
    before = torch.get_rng_state()
    one, same, other = (tiny_model(tokenizer, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for (name, weight), twin, stranger in zip(
        one.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(weight, twin), name
        assert "norm" in name or not torch.equal(weight, stranger), name
    assert one.lm_head.weight.std().item() == pytest.approx(0.1, rel=0.1)


def test_sizes_are_those_requested() -> None:
    tokenizer = tiny_tokenizer(TEXTS)
    model = tiny_model(tokenizer, hidden_size=32, num_layers=3, num_heads=2, max_positions=50)
    assert model.model.embed_tokens.weight.shape == (len(tokenizer), 32)
    assert len(model.model.layers) == 3
    assert (model.config.num_attention_heads, model.config.max_position_embeddings) == (2, 50)


@pytest.mark.parametrize("sizes", [{"hidden_size": 60, "num_heads": 4}, {"num_layers": 0}, {"num_heads": 0}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="multiple of 2"):
        tiny_model(tiny_tokenizer(TEXTS), **sizes)


def test_a_tokenizer_without_pad_is_refused() -> None:
    tokenizer = tiny_tokenizer(TEXTS)
    tokenizer.pad_token = None
    with pytest.raises(ConfigError, match="padding token"):
        tiny_model(tokenizer)


class Game:
    def vocabulary_texts(self) -> Iterator[str]:
        yield from TEXTS


def test_a_game_that_knows_its_words_gives_the_same_policy_as_its_texts() -> None:
    model, tokenizer = tiny_policy(Game(), hidden_size=16)
    assert tokenizer.get_vocab() == tiny_tokenizer(TEXTS).get_vocab()
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (object(), r"vocabulary_texts\(\)"),
        ("Is it a clock?", "several texts"),
        ([], "at least one word"),
        ([""], "at least one word"),
        (["Yes.", 3], "got 3"),
    ],
)
def test_a_source_without_words_is_refused(source: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        tiny_policy(source)


CALL = call_text("look_up", {"item": "clock", "times": 7})
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look_up", "add")]


def test_a_call_is_one_token_for_each_name_and_value_and_for_what_stands_around_them() -> None:
    tokenizer = tiny_tokenizer([*TEXTS, CALL])
    marks = ['<tool_call>{"name": "', "look_up", '", "arguments": {', '"item": "', "clock", '", "times": ', "7"]
    assert tokenizer.tokenize(CALL) == [*marks, "}}</tool_call>"]
    assert tokenizer.decode(tokenizer(CALL).input_ids, skip_special_tokens=True) == CALL
    assert call_text("look_up", {}) == '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'


def test_the_template_prints_tools_calls_and_results_once_a_text_holds_a_call() -> None:
    tokenizer = tiny_tokenizer([*TEXTS, CALL])
    function = {"name": "look_up", "arguments": {"item": "clock", "times": 7}}
    calls = [{"type": "function", "function": one} for one in (function, {**function, "arguments": {}})]
    messages = [
        {"role": "user", "content": "Is it a clock?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "Yes."},
        {"role": "tool", "content": "Yes."},
    ]
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|tool|>look_up<|tool|>add<|end|>Is it a clock?"
        f"<|assistant|>{CALL}{call_text('look_up', {})}<|end|>Yes.<|end|>Yes.<|assistant|>"
    )
    assert tokenizer.apply_chat_template(messages[:1], tokenize=False) == "Is it a clock?"
    assert "<|tool|>" in tokenizer.all_special_tokens


def test_a_vocabulary_without_calls_has_no_tokens_for_them() -> None:
    tokenizer = tiny_tokenizer(TEXTS)
    assert not any("tool" in token for token in tokenizer.get_vocab())
    assert "tool" not in tokenizer.chat_template
