"""Other packages' clients, as programs that play a server of `agentsgym serve`; run by the interpreter with OpenEnv.

python openenv_players.py client URL                    OpenEnv's own client, in many sessions
python openenv_players.py trl URL FOLDER SITE_PACKAGES  TRL's GRPOTrainer over OpenEnv's client, one step

Both print one JSON object. TRL is found in SITE_PACKAGES, after what OpenEnv needs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from openenv.core import GenericEnvClient

NUM_SESSIONS = 16


async def played(url: str, seed: int) -> dict[str, Any]:
    """Play an episode of Guess to its end."""
    async with GenericEnvClient(base_url=url) as client:
        result = await client.reset(seed=seed)
        texts, rewards = [result.observation["text"]], []
        while not result.done:
            result = await client.step({"message": str(len(rewards) + 1)})
            texts.append(result.observation["text"])
            rewards.append(result.reward)
        state = await client.state()
        return {"texts": texts, "rewards": rewards, "success": result.metadata["success"], **state}


async def played_often(url: str, seeds: list[int]) -> list[dict[str, Any]]:
    """Play an episode of each seed, all at once."""
    return await asyncio.gather(*(played(url, seed) for seed in seeds))


def tools_called(url: str) -> dict[str, Any]:
    """Call a tool and answer, with the synchronous client; and be refused."""
    with GenericEnvClient(base_url=url).sync() as client:
        tools = client.step({"type": "list_tools"}).observation["tools"]
        first = client.reset(seed=1)
        called = client.step({"type": "call_tool", "tool_name": "price", "arguments": {"good": "bread"}})
        refusals = []
        for work in (lambda: client.reset(sed=1), lambda: client.step({"text": "x"})):
            try:
                work()
            except RuntimeError as error:
                refusals.append(str(error))
        answered = client.step({"message": called.observation["result"]})
    return {
        "tools": [tool["name"] for tool in tools],
        "first": first.observation["text"],
        "called": called.observation,
        "refusals": refusals,
        "done": answered.done,
    }


def trained(url: str, folder: Path) -> dict[str, Any]:
    """Train for one step with TRL, whose environments are clients; the model names what the test wants."""
    import torch  # noqa: PLC0415
    import trl  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    from agentsgym.testing import chat_tokenizer  # noqa: PLC0415

    class Guess:
        """The environment as TRL's documentation writes one around a client."""

        def __init__(self) -> None:
            self.client = GenericEnvClient(base_url=url).sync()
            self.client.connect()

        def reset(self, seed: int, **_: Any) -> str:
            """Start an episode."""
            self.reward, self.done = 0.0, False
            return self.client.reset(seed=seed).observation["text"]

        def guess(self, number: str) -> str:
            """Guess the number.

            Args:
                number: The guess.

            Returns:
                What happened.
            """
            if self.done:
                raise ValueError("The episode is over.")
            result = self.client.step({"message": number})
            self.reward, self.done = self.reward + result.reward, result.done
            return result.observation["text"]

        def get_reward(self) -> float:
            """Return the sum of the rewards."""
            return self.reward

    class Scripted(Qwen3ForCausalLM):
        """Guesses 1, 2, 3, …, and every second time 9; its weights are trained as they are."""

        def generate(self, input_ids: Any, attention_mask: Any, **_: Any) -> Any:
            output = []
            for row, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True)):
                text = tokenizer.decode(ids[mask.bool()])
                num_reported = text.count("<tool_response>")
                number = 9 if '"number": "9"' in text or (row % 2 and not num_reported) else num_reported + 1
                call = (
                    f'<tool_call>\n{{"name": "guess", "arguments": {{"number": "{number}"}}}}\n</tool_call><|im_end|>'
                )
                output.append(torch.tensor(tokenizer.encode(call, add_special_tokens=False)))
            pad = tokenizer.pad_token_id
            return torch.cat([input_ids, torch.nn.utils.rnn.pad_sequence(output, True, pad)], dim=1)

    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    size = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Scripted(Qwen3Config(vocab_size=len(tokenizer), num_hidden_layers=1, head_dim=8, **size))
    before = [tensor.clone() for tensor in model.parameters()]
    prompt = [{"role": "user", "content": "Play.\n\n"}]
    trainer = trl.GRPOTrainer(
        model,
        environment_factory=Guess,
        train_dataset=Dataset.from_list([{"prompt": prompt, "seed": seed} for seed in range(2)]),
        processing_class=tokenizer,
        args=trl.GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            max_steps=1,
            num_generations=2,
            per_device_train_batch_size=4,
            max_completion_length=2000,
            max_tool_calling_iterations=4,
            learning_rate=1e-2,
            beta=0.0,
        ),
    )
    trainer.train()
    log = trainer.state.log_history[0]
    moved = any(not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    return {"reward": log["reward"], "moved": moved, "calls": log["tools/call_frequency"]}


def main() -> None:
    """Play, and print what was played."""
    if sys.argv[1] == "client":
        seeds = [seed // 2 for seed in range(NUM_SESSIONS)]
        url = sys.argv[2]
        result = {
            "episodes": asyncio.run(played_often(f"{url}/Guess", seeds)),
            "tools": tools_called(f"{url}/PriceList"),
        }
    else:
        sys.path.append(sys.argv[4])
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        result = trained(f"{sys.argv[2]}/Guess", Path(sys.argv[3]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
