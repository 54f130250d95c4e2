"""Everything that plays without our trainer is imported with the TRL and transformers of other frameworks."""

from __future__ import annotations

import subprocess
import sys

# Names that Axolotl's TRL 1.9 and transformers 5.16 lack; `make test-axolotl` runs with these versions.
HIDDEN = """
import sys
import transformers
from trl import GRPOTrainer, SFTTrainer  # import trl.kernels themselves, so they come first

lacking = {"GgufConfig"}
lazy = type(transformers)
found = lazy.__getattr__

def only_older(module, name):
    if name in lacking:
        raise AttributeError(name)
    return found(module, name)

lazy.__getattr__ = only_older
sys.modules["trl.kernels"] = None
for name in lacking:
    assert not hasattr(transformers, name)
"""
PLAYED = """
import agentsgym, agentsgym.interop
from agentsgym import PolicyAgent, imitate, tiny_policy
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv

config = {"max_steps_per_episode": 2, "error_allowance": 2}
model, tokenizer = tiny_policy(TwentyQuestionsEnv(env_config=config))
env = TwentyQuestionsEnv(tokenizer, config)
[played] = env.rollout([{"solution": "apple"}], PolicyAgent(model, tokenizer, max_turn_tokens=4))
print(played.exact, played.stop_reason)
"""


def test_what_plays_without_the_trainer_needs_no_newer_names() -> None:
    ran = subprocess.run([sys.executable, "-c", HIDDEN + PLAYED], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split()[0] == "True"
