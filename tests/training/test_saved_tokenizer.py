"""The tokenizer of an environment beside the one in the model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from games import GuessNumber, settings, tasks
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentsgym import ConfigError, GRPOEnvTrainer, tiny_policy


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
        with pytest.raises(ConfigError, match=f"that the model has in .*model, but {what}.* another id"):
            build(wrong)
    assert "another chat template" not in caplog.text
    build(tokenizer).close()
    build(template).close()
    assert caplog.text.count("another chat template") == 1
