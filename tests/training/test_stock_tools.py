"""TRL's own tool loop plays our environments: a model that writes scripted calls is rewarded and trained for them."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from stock import stock_settings
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer

from agentsgym.envs.Tools import ToolEnv
from agentsgym.interop import as_environment_factory, prompt_dataset
from agentsgym.testing import chat_tokenizer

TEMPLATE = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


BEGINNINGS = (
    call("add", '{"first": 3, "second": 4}'),
    call("add", '{"first": "many", "second": 4}'),
    "I would rather not.",
    call("answer", '{"action": "8"}') + "\n" + call("add", '{"first": 1, "second": 1}'),
)
ANSWERS = {
    "<tool_response>\n7\n": call("answer", '{"action": "7"}'),
    "'first' of 'add' must be an integer": call("jump", "{}"),
}


class Scripted(Qwen3ForCausalLM):
    """Begins in each of four ways, and goes on from what it was given; its weights are trained as they are."""

    tokenizer: Any
    prompts: list[str]

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        beginnings = cycle(BEGINNINGS)
        output: list[torch.Tensor] = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            text = self.tokenizer.decode(ids[mask.bool()])
            self.prompts.append(text)
            reported = text.rpartition("<|im_start|>user\n")[2]
            answer = next((answer for key, answer in ANSWERS.items() if key in reported), "That is all.")
            if "<tool_response>" not in reported:
                answer = next(beginnings)
            output.append(torch.tensor(self.tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False)))
        pad = self.tokenizer.pad_token_id
        padded = torch.nn.utils.rnn.pad_sequence(output, batch_first=True, padding_value=pad)
        return torch.cat([input_ids, padded], dim=1)


def add(first: int, second: int) -> int:
    """Add two numbers.

    Args:
        first: One of them.
        second: The other.
    """
    return first + second


def test_trls_tool_loop_plays_rewards_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = TEMPLATE
    size = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=len(tokenizer), num_hidden_layers=1, head_dim=8, **size)
    model = Scripted(config)
    model.tokenizer, model.prompts = tokenizer, []
    env = ToolEnv(tools=[add], env_config={"call_reward": 0.25})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = GRPOTrainer(
        model,
        environment_factory=as_environment_factory(env),
        train_dataset=prompt_dataset([{"question": "What is 3 + 4?", "answer": "7"}], instruction="Reply."),
        processing_class=tokenizer,
        args=stock_settings(
            tmp_path, max_steps=1, num_generations=4, per_device_train_batch_size=4, max_completion_length=2000
        ),
    )
    trainer.train()

    assert "<|im_start|>user\nReply.\n\nWhat is 3 + 4?<|im_end|>" in model.prompts[0]
    assert '"name": "add"' in model.prompts[0]
    assert '"name": "answer"' in model.prompts[0]
    turns = [text.count("<|im_start|>assistant\n") for text in model.prompts]
    assert turns == [1, 1, 1, 1, 2, 2, 2, 3, 3]  # who calls nothing plays on no longer
    assert "{'error': 'The episode is over.'}" in model.prompts[6]  # the second call of one turn, after the answer
    log = trainer.state.log_history[0]
    assert log["reward"] == pytest.approx((0.25 + 1.0) / 4)  # the first is right; nothing else was worth anything
    assert not env.active_states
    assert any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
