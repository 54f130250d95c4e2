"""One rank whose rollouts run ahead of training; it writes what it found."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import torch
from games import policy, settings, tasks
from launch import leave
from test_asynchronous import UnevenGame

from agentsgym import Action, CopiedPolicyAgent, GRPOEnvTrainer, RolloutStore, TurnRequest


def main(folder: Path) -> None:
    rank = os.environ["RANK"]
    model, tokenizer = policy()
    args = settings(
        folder, max_staleness=2, max_steps=5, env_pool="threads", store_rollouts=str(folder / f"rollouts-{rank}")
    )
    agent = CopiedPolicyAgent(model, tokenizer, max_turn_tokens=4)
    trainer = GRPOEnvTrainer(model, UnevenGame(tokenizer), args, tasks(8), agent=agent)
    trainer.train()
    records = [*RolloutStore(args.store_rollouts).records()]
    (action,) = agent.act([TurnRequest(session_id="one that is new", messages=[], token_ids=[4], max_new_tokens=1)])
    assert isinstance(action, Action)
    found = {
        "order": trainer.generator.order.state_dict(),
        "seeds": Counter(one.trajectory.task_data["seed"] for one in records),
        "ages": [one.step - turn.policy_version for one in records for turn in one.trajectory.turns],
        "draw": action.agent_state.rng.random(),
        "weights": [float(one.sum()) for one in trainer.model.parameters()],
        "staleness": [log["staleness/max"] for log in trainer.state.log_history if "staleness/max" in log],
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
