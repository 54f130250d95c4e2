"""Time a rollout function of TRL's: ours, beside the one that is written by hand, ``generate`` on the whole history.

The second pads the histories on the left, generates a turn, decodes, steps the environment and appends its answer. Both
play the same game, whose answers are as long as the budget of a turn; times are CPU seconds of the call, taking turns.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# transformers and TRL leave parts of their signatures untyped.

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from agentsgym import MultistepEnv
from agentsgym.interop import environment_reward, prompt_dataset, rollout_func
from agentsgym.testing import chat_tokenizer

ANSWER_TOKENS = 8


class Echo(MultistepEnv):
    """Says a sentence of some thirty tokens at every turn, and never ends by itself."""

    default_config: ClassVar = {"max_steps_per_episode": 32}

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "rng": self.rng(session_id)}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return " ".join(f"{state['rng'].randrange(100)}" for _ in range(12))

    def _step_episode(
        self, session_id: str, state: dict[str, Any], action: str
    ) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        return state, 0.0, False, {}


def by_hand(num_turns: int) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A rollout function as it is written today."""

    def play(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        tokenizer: Any = trainer.processing_class
        model = trainer.accelerator.unwrap_model(trainer.model).eval()  # training with checkpointing keeps no cache
        env = Echo()
        states = [env.start_session(str(index), {}, index) for index in range(len(prompts))]
        messages: list[list[dict[str, str]]] = [[] for _ in prompts]
        first: list[list[int]] = []
        completions: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        for turn in range(num_turns):
            for state, history in zip(states, messages, strict=True):
                history.append({"role": "user", "content": env._format_prompt(state, turn)})  # pyright: ignore[reportPrivateUsage]
            texts = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in messages]
            batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
            batch = batch.to(model.device)
            if not first:
                first = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            with torch.no_grad():
                given = model.generate(
                    **batch, min_new_tokens=ANSWER_TOKENS, max_new_tokens=ANSWER_TOKENS, do_sample=True
                )[:, batch["input_ids"].shape[1] :]
            for index, ids in enumerate(given.tolist()):
                messages[index].append({"role": "assistant", "content": tokenizer.decode(ids)})
                completions[index] += ids
                masks[index] += [1] * len(ids)
        model.train()
        return {"prompt_ids": first, "completion_ids": completions, "logprobs": None, "env_mask": masks}

    return play


def trainer_with(function: Any, num_episodes: int, hidden_size: int, num_layers: int, folder: str) -> Any:
    """TRL's trainer of a random model, with a rollout function."""
    tokenizer: Any = chat_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2, head_dim=hidden_size // 4,
        max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    args = GRPOConfig(
        output_dir=folder, report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
        per_device_train_batch_size=num_episodes, num_generations=num_episodes, max_completion_length=8000,
    )  # fmt: skip
    rows = [{"task_data": {"seed": 0}}]
    return GRPOTrainer(
        model, environment_reward, args, prompt_dataset(rows), processing_class=tokenizer, rollout_func=function
    )


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=16, help="default: 16")
    parser.add_argument("--turns", type=int, default=32, help="default: 32")
    parser.add_argument("--hidden-size", type=int, default=128, help="default: 128")
    parser.add_argument("--layers", type=int, default=2, help="default: 2")
    parser.add_argument("--repeats", type=int, default=3, help="default: 3, the first of which does not count")
    options = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(1)
    functions = {
        "agentsgym": rollout_func(
            lambda tokenizer: Echo(tokenizer, {"max_steps_per_episode": options.turns}), max_turn_tokens=ANSWER_TOKENS
        ),
        "by_hand": by_hand(options.turns),
    }
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    tokens: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        size = (options.episodes, options.hidden_size, options.layers)
        trainers = {name: trainer_with(function, *size, folder) for name, function in functions.items()}
        for _ in range(options.repeats):
            for name, trainer in trainers.items():
                prompts: list[Any] = [*trainer.train_dataset["prompt"]] * options.episodes
                start = time.process_time()
                found = functions[name](prompts, trainer)
                seconds[name].append(time.process_time() - start)
                masks: Any = found["env_mask"]
                tokens[name] = statistics.fmean(map(sum, masks))
    medians = {name: statistics.median(values[1:] or values) for name, values in seconds.items()}  # one warms up
    ratio = medians["by_hand"] / medians["agentsgym"]
    print(json.dumps({**vars(options), "cpu_s": medians, "agent_tokens": tokens, "times_faster": round(ratio, 2)}))


if __name__ == "__main__":
    main()
