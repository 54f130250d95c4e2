"""Train with TRL's ``GRPOTrainer`` and a rollout function written by hand: one reward per rollout, no KV cache kept."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# transformers and TRL leave parts of their signatures untyped.

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from trl import GRPOConfig, GRPOTrainer

from agentsgym.interop import prompt_dataset

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from agentsgym import MultistepEnv, TrainingRun

SHARED_SETTINGS = (
    "seed",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "learning_rate",
    "lr_scheduler_type",
    "logging_steps",
    "bf16",
    "use_cpu",
    "save_strategy",
    "report_to",
    "max_completion_length",
)


@dataclass
class Episode:
    """One episode: its environment, its tokens so far, and which of them the model sampled."""

    env: MultistepEnv
    prompt: list[int]
    tokens: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])
    reward: float = 0.0
    done: bool = False

    def add(self, tokens: list[int], *, sampled: bool) -> None:
        """Append tokens."""
        self.tokens += tokens
        self.mask += [int(sampled)] * len(tokens)


class ByHand:
    """The rollout function: ``generate`` on the whole history of every running episode, turn by turn."""

    def __init__(self, env: MultistepEnv, max_turn_tokens: int) -> None:
        self._env, self._max_turn_tokens = env, max_turn_tokens

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Play an episode per prompt."""
        tokenizer: Any = trainer.processing_class
        episodes = [self._begin(tokenizer, json.loads(prompt)["agentsgym_row"]["task_data"]) for prompt in prompts]
        while running := [episode for episode in episodes if not episode.done]:
            for episode, sampled in zip(running, self._sample(trainer, tokenizer, running), strict=True):
                self._step(tokenizer, episode, sampled)
        return {
            "prompt_ids": [episode.prompt for episode in episodes],
            "completion_ids": [episode.tokens for episode in episodes],
            "env_mask": [episode.mask for episode in episodes],
            "logprobs": None,
            "total_reward": [episode.reward for episode in episodes],
        }

    def _begin(self, tokenizer: Any, task: dict[str, Any]) -> Episode:
        env = type(self._env)(tokenizer, dict(self._env.env_config))
        messages = env.reset(task)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        return Episode(env, ids)

    def _sample(self, trainer: Any, tokenizer: Any, running: list[Episode]) -> list[list[int]]:
        rows = [{"input_ids": episode.prompt + episode.tokens} for episode in running]
        batch = tokenizer.pad(rows, return_tensors="pt", padding_side="left")
        model = trainer.accelerator.unwrap_model(trainer.model).eval()  # training with checkpointing keeps no cache
        with torch.no_grad(), torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=trainer.args.bf16):
            given = model.generate(
                **batch.to(model.device), max_new_tokens=self._max_turn_tokens, do_sample=True, top_k=0
            )
        model.train()
        return [_until(ids, tokenizer.eos_token_id) for ids in given[:, batch["input_ids"].shape[1] :].tolist()]

    def _step(self, tokenizer: Any, episode: Episode, sampled: list[int]) -> None:
        episode.add(sampled, sampled=True)
        text = tokenizer.decode(sampled, skip_special_tokens=True)
        messages, reward, episode.done, _ = episode.env.step(text)
        episode.reward += reward
        if not episode.done:
            closing = "" if sampled[-1] == tokenizer.eos_token_id else tokenizer.eos_token
            turns = "".join(f"\n<|im_start|>{one['role']}\n{one['content']}<|im_end|>" for one in messages)
            following = f"{closing}{turns}\n<|im_start|>assistant\n"
            episode.add(tokenizer(following, add_special_tokens=False)["input_ids"], sampled=False)


def _until(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


def total_reward(prompts: list[Any], total_reward: list[float], **_: Any) -> Any:  # noqa: ARG001
    """Return the sum of each rollout's rewards."""
    return total_reward


def train_by_hand(run: TrainingRun, env: MultistepEnv, rows: Any, callback: TrainerCallback) -> None:
    """Train the policy of a run as :meth:`TrainingRun.learn` does, with TRL's trainer and the same settings."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    args = GRPOConfig(run.args.output_dir, **{name: getattr(run.args, name) for name in SHARED_SETTINGS})
    trainer = GRPOTrainer(
        run.model,
        total_reward,
        args,
        prompt_dataset(rows),
        processing_class=run.tokenizer,
        rollout_func=ByHand(env, run.args.max_turn_tokens),
        peft_config=run.peft_config,
        callbacks=[callback],
    )
    trainer.train()
    run.model = cast("Any", trainer.model).merge_and_unload()
