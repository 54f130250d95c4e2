"""Train a policy on a multi-turn environment, with the entire algorithm on this page.

The loop below does by hand what ``GRPOEnvTrainer`` does: play each task several times, credit every turn with its
reward and those that follow it, compare it with the same turn of the other rollouts, and raise the log-probability of
the tokens of better turns. Start here to write your own algorithm.

    python examples/one_page.py            # about half a minute on a CPU
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from agentsgym import MultistepEnv, PolicyAgent, ScoredRollout, Trajectory, tiny_policy
from agentsgym.batch.views import pad_right
from agentsgym.credit.advantages import get_estimator, token_advantages

WORDS = ["one", "two", "three", "four", "five"]


class Counting(MultistepEnv):
    """Name the next number until five is reached; the first mistake ends the episode."""

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
        return {"done": False, "at": self.rng(session_id).randrange(2)}

    def _format_prompt(self, state: dict[str, Any], step: int) -> str:
        return WORDS[state["at"]]

    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        is_right = action.strip() == WORDS[state["at"] + 1]
        state = {**state, "at": state["at"] + is_right}
        is_over = not is_right or state["at"] == len(WORDS) - 1
        return state, float(is_right), is_over, {"success": is_right and is_over}


def policy_loss(model: Any, rollouts: list[Trajectory], advantages: list[list[float]], pad_token_id: Any) -> Any:
    """Return the policy-gradient loss: minus the mean of advantage × log-probability over the agent's tokens."""
    width = max(len(one.token_ids) for one in rollouts)
    ids = torch.tensor([pad_right(one.token_ids, width, pad_token_id) for one in rollouts])  # (B, T)
    mask = torch.tensor([pad_right(one.agent_token_mask, width, 0) for one in rollouts])  # (B, T)
    weights = torch.tensor([pad_right(own, width, 0.0) for own in advantages])  # (B, T)
    logits = model(ids).logits[:, :-1]  # padding is on the right, so no other token attends to it
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)  # (B, T - 1)
    return -(logprobs * weights[:, 1:] * mask[:, 1:]).sum() / mask.sum()


def train(num_steps: int = 100, num_tasks: int = 8, num_rollouts: int = 8) -> list[float]:
    """Train a tiny policy from scratch, and return the mean reward of each step."""
    torch.manual_seed(0)
    model, tokenizer = tiny_policy([" ".join(WORDS)])
    env = Counting(tokenizer, {"max_steps_per_episode": len(WORDS)})
    agent = PolicyAgent(model, tokenizer, max_turn_tokens=2)
    estimator = get_estimator("return_to_go")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rewards: list[float] = []
    for step in range(num_steps):
        agent.reseed(step)
        tasks = [{"seed": step * num_tasks + index} for index in range(num_tasks)]
        rollouts = env.rollout(tasks, agent, num_rollouts)
        scored = [ScoredRollout.from_trajectory(one, group=one.task_index) for one in rollouts]
        by_turn = estimator(scored, discount=1.0, scale="group")  # one number per turn
        pairs = zip(rollouts, by_turn, strict=True)
        by_token = [token_advantages(one, own, estimator=estimator) for one, own in pairs]
        optimizer.zero_grad()
        policy_loss(model, rollouts, by_token, tokenizer.pad_token_id).backward()
        optimizer.step()
        rewards.append(sum(one.final_reward for one in rollouts) / len(rollouts))
        if step % 10 == 9:
            win_rate = sum(bool(one.success) for one in rollouts) / len(rollouts)
            print(f"step {step + 1}: reward {rewards[-1]:.2f}, win rate {win_rate:.0%}")
    return rewards


if __name__ == "__main__":
    train(*map(int, sys.argv[1:2]))
