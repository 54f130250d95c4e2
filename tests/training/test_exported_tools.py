"""A rollout with tools, exported for TRL's ``SFTTrainer``, becomes the tokens that the agent saw and answered."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import ran
from datasets import load_dataset
from tool_chat import tool_family
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from agentsgym import evaluate
from agentsgym.envs.PriceList import PriceListEnv, ReferencePlayer
from agentsgym.store.reader import RolloutStore


def test_the_sft_trainer_renders_the_prompt_of_the_rollout(tmp_path: Path) -> None:
    tokenizer = tool_family("qwen2_5")
    env = PriceListEnv(tokenizer)
    tasks, store = env.tasks(3), tmp_path / "store"
    played = evaluate(env, ReferencePlayer(env), tasks, store=store, agent_name="reference").trajectories
    assert [json.dumps(one.tools) for one in RolloutStore(store).records()] == [json.dumps(env.tool_schemas)] * 3
    assert ran("export", store, "--to", "sft", "-o", tmp_path / "won.jsonl").code == 0
    rows = load_dataset(
        "json", data_files=str(tmp_path / "won.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    trainer = SFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes)),
        args=SFTConfig(output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True, bf16=False, max_length=None),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    texts = [tokenizer.decode(ids) for ids in trainer.train_dataset["input_ids"]]
    assert texts == [f"{tokenizer.decode(one.token_ids)}\n" for one in played]  # the template ends its last line
    assert all("Look up what a good costs." in text for text in texts)
