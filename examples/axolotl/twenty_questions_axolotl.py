"""Train on Twenty Questions with Axolotl; ``twenty_questions.yaml`` refers to the functions in this module.

::

    python twenty_questions_axolotl.py        # writes tasks and a tiny warm-started policy to data/
    axolotl train twenty_questions.yaml
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentsgym.envs.TwentyQuestions import DEMO_OBJECTS, DEMO_PROPERTIES, ImitationPlayer, TwentyQuestionsEnv
from agentsgym.interop import as_prompt, environment_reward, rollout_func

__all__ = ["environment_reward", "play"]

ENV_CONFIG: dict[str, Any] = {
    "objects": list(DEMO_OBJECTS),
    "properties": list(DEMO_PROPERTIES),
    "max_steps_per_episode": 7,
    "final_guess": True,
    "system_prompt": "",
}

#: ``trl.rollout_func``: each row names its environment, which is built with the tokenizer that Axolotl loads.
play = rollout_func(max_turn_tokens=12)


def main(folder: Path = Path("data"), num_tasks: int = 256, warm_up: int = 200) -> None:
    """Write the files that the YAML reads: tasks as prompts, and a tiny policy after imitation."""
    from agentsgym.tiny import tiny_policy  # noqa: PLC0415  # not needed when Axolotl imports this module
    from agentsgym.training.selection.imitate import imitate, tiny_imitation_config  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    rows = TwentyQuestionsEnv.get_train_dataset(ENV_CONFIG, size=num_tasks, split="all")
    with (folder / "tasks.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": as_prompt(dict(row))}) + "\n" for row in rows)
    model, tokenizer = tiny_policy(TwentyQuestionsEnv(env_config=ENV_CONFIG))
    env = TwentyQuestionsEnv(tokenizer, ENV_CONFIG)
    demonstrations = env.rollout([dict(row) for row in rows], ImitationPlayer(env, 0), max_concurrent=256)
    imitate(model, demonstrations, tokenizer, tiny_imitation_config(warm_up, disable_tqdm=True))
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")


if __name__ == "__main__":
    main()
