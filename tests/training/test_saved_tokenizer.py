"""The tokenizer of an environment beside the one in the model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from games import GuessNumber, settings, tasks
from transformers import AutoModelForCausalLM, AutoTokenizer, ProcessorMixin

from agentsgym import ConfigError, GRPOEnvTrainer, PolicyAgent, tiny_policy


def test_another_tokenizer_than_the_saved_one_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = tiny_policy(["low high", *map(str, range(10))], hidden_size=16, num_heads=2)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    other = tiny_policy(["high", *map(str, range(5))], hidden_size=16, num_heads=2)[1]
    special, template = (AutoTokenizer.from_pretrained(tmp_path / "model") for _ in range(2))
    special.eos_token = special.convert_ids_to_tokens(len(special) - 1)
    template.chat_template = f"{template.chat_template} "

    def build(own: Any) -> GRPOEnvTrainer:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        return GRPOEnvTrainer(loaded, GuessNumber(own), settings(tmp_path / "out"), train_dataset=tasks())

    for wrong, what in ((other, "the token "), (special, "eos_token_id")):
        sentence = f"that the model has in .*model, but {what}.* another id"
        with pytest.raises(ConfigError, match=sentence):
            build(wrong)
        with pytest.raises(ConfigError, match=sentence):
            PolicyAgent(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), wrong)
    assert "another chat template" not in caplog.text
    build(tokenizer).close()
    build(template).close()
    assert caplog.text.count("another chat template") == 1


def test_added_tokens_need_rows_and_a_processor_stands_for_its_tokenizer(tmp_path: Path) -> None:
    model, tokenizer = tiny_policy(["low high", *map(str, range(10))], hidden_size=16, num_heads=2)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    longer = AutoTokenizer.from_pretrained(tmp_path / "model")
    longer.add_tokens(["<note>", "</note>"])
    other = tiny_policy(["high", *map(str, range(5))], hidden_size=16, num_heads=2)[1]

    class Processor(ProcessorMixin):
        def __init__(self, tokenizer: Any, **options: Any) -> None:
            super().__init__(tokenizer, **options)

    def build(own: Any, *, num_rows: int) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        loaded.resize_token_embeddings(num_rows)
        processor = Processor(own, chat_template=own.chat_template)
        assert PolicyAgent(loaded, processor).tokenizer is own
        args = settings(tmp_path / "out")
        trainer = GRPOEnvTrainer(loaded, GuessNumber(own), args, train_dataset=tasks(), processing_class=processor)
        assert trainer.processing_class is own
        trainer.close()

    build(longer, num_rows=len(longer))
    build(tokenizer, num_rows=len(tokenizer))
    with pytest.raises(ConfigError, match=f"must have a row for each id of the tokenizer, got {len(tokenizer)} rows"):
        build(longer, num_rows=len(tokenizer))
    with pytest.raises(ConfigError, match="another id in it"):
        build(other, num_rows=len(tokenizer))
