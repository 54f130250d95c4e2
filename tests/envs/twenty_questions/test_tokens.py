"""Twenty Questions with real tokenizers: what is recorded, what is rewarded, and what a template is refused for."""

from functools import cache
from itertools import groupby
from typing import Any

import pytest
import torch
from small_game import OBJECTS, PROPERTIES

from agentsgym import Action, Agent, PolicyAgent, ScriptedAgent, TemplateError, tiny_policy
from agentsgym.envs import TwentyQuestionsEnv
from agentsgym.testing import chat_tokenizer
from agentsgym.tiny import tiny_tokenizer

GAME = {"objects": OBJECTS, "properties": PROPERTIES, "max_steps_per_episode": 4}
TASKS = [{"solution": "bee", "seed": 0}, {"solution": "kite", "seed": 1}]
QUESTIONS = ["Is it an animal?", "hello", "Can it fly?", "Is it a bee?"]


@cache
def tokenizer_of(kind: str) -> Any:
    return tiny_tokenizer(TwentyQuestionsEnv(None, GAME).vocabulary_texts()) if kind == "tiny" else chat_tokenizer(kind)


def letters(tokenizer: Any, text: str) -> list[int]:
    """A tokenization that the tokenizer itself would not choose: one token a character."""
    return [token_id for letter in text for token_id in tokenizer(letter, add_special_tokens=False)["input_ids"]]


class Speller(Agent):
    """Requests scripted questions letter by letter, and keeps the prompts that it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.heard: dict[str, list[tuple[list[int], list[int]]]] = {}

    def act(self, requests: Any) -> list[Action]:
        actions = []
        for request in requests:
            turns = self.heard.setdefault(request.session_id, [])
            output = QUESTIONS[len(turns)]
            ids = [*letters(self.tokenizer, output), self.tokenizer.eos_token_id]
            turns.append((list(request.token_ids), ids))
            actions.append(Action(text=output, token_ids=ids, logprobs=[-1.0] * len(ids)))
        return actions


@pytest.mark.parametrize("kind", ["chatml", "llama3", "default_system"])
def test_the_mask_marks_exactly_what_the_agent_sampled_and_its_ids_are_kept(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    agent = Speller(tokenizer)
    trajectories = TwentyQuestionsEnv(tokenizer, GAME).rollout(TASKS, agent, num_rollouts=2)
    assert letters(tokenizer, QUESTIONS[0]) != tokenizer(QUESTIONS[0], add_special_tokens=False)["input_ids"]
    assert {len(trajectory.turns) for trajectory in trajectories} == {4}
    for trajectory in trajectories:
        sampled = [False] * len(trajectory.token_ids)
        for (prompt, ids), turn in zip(agent.heard[trajectory.session_id], trajectory.turns, strict=True):
            assert trajectory.token_ids[: turn.start] == prompt
            assert trajectory.token_ids[turn.start : turn.stop] == ids
            sampled[turn.start : turn.stop] = [True] * len(ids)
        assert [bool(marked) for marked in trajectory.agent_token_mask] == sampled
        assert trajectory.exact


@pytest.mark.parametrize("kind", ["chatml", "llama3", "tiny"])
def test_an_episode_that_the_caller_began_is_returned_as_one_row(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    env = TwentyQuestionsEnv(tokenizer, GAME)
    env.active_states["mine"] = env._initialize_episode("mine", {"solution": "bee", "seed": 0})
    output = [*QUESTIONS[:1], *QUESTIONS[2:]]  # "hello" has no token of the tiny tokenizer
    row = env._run_complete_episode("mine", ScriptedAgent(output))
    ids, mask, rewards = (row[name] for name in ("full_token_ids", "agent_token_mask", "per_token_rewards"))
    assert len(ids) == len(mask) == len(rewards) == len(row["full_attention_mask"])
    assert {*row["full_attention_mask"]} == {1}
    assert row["session_id"] == "mine"
    assert env.active_states["mine"]["observation"] == "Yes."  # the caller may look at the last state
    spans = [[*group] for is_output, group in groupby(range(len(ids)), lambda place: bool(mask[place])) if is_output]
    assert [tokenizer.decode([ids[place] for place in span], skip_special_tokens=True) for span in spans] == output
    conversation = row["final_completion_messages"]
    assert [one["content"] for one in conversation if one["role"] == "assistant"] == output
    assert [one["content"] for one in conversation if one["role"] == "user"][1:3] == ["Yes.", "Yes."]
    assert not any(reward for reward, marked in zip(rewards, mask, strict=True) if not marked)
    assert sum(rewards[place] for place in spans[-1]) == pytest.approx(1.0)
    assert row["final_reward"] == pytest.approx(sum(rewards))


@pytest.mark.parametrize("kind", ["chatml", "inst", "none", "tiny"])
@pytest.mark.parametrize("token_credit", ["spread", "last"])
def test_rewards_lie_on_agent_tokens_and_sum_to_what_the_turns_were_rewarded(kind: str, token_credit: str) -> None:
    env = TwentyQuestionsEnv(tokenizer_of(kind), {**GAME, "token_credit": token_credit})
    trajectories = env.rollout(TASKS, ScriptedAgent(QUESTIONS))
    assert [turn.reward for turn in trajectories[0].turns] != [0.0] * 4
    for trajectory in trajectories:
        rewards = trajectory.per_token_rewards
        for turn in trajectory.turns:
            assert sum(rewards[turn.start : turn.stop]) == pytest.approx(turn.reward, abs=1e-12)
        off_the_agent = [r for r, marked in zip(rewards, trajectory.agent_token_mask, strict=True) if not marked]
        assert set(off_the_agent) == {0.0}
        assert sum(rewards) == pytest.approx(trajectory.final_reward, abs=1e-12)


def test_run_trial_pads_the_rows_of_each_task_to_its_own_longest() -> None:
    tokenizer = tokenizer_of("chatml")

    class Babbler(Speller):
        """Its rollouts differ in length."""

        def act(self, requests: Any) -> list[Action]:
            actions = []
            for request in requests:
                turns = self.heard.setdefault(request.session_id, [])
                count = 1 + (3 * len(self.heard) + len(turns)) % 7
                ids = [*letters(tokenizer, "x" * count), tokenizer.eos_token_id]
                turns.append((list(request.token_ids), ids))
                actions.append(Action(text="x" * count, token_ids=ids))
            return actions

    agent = Babbler(tokenizer)
    env = TwentyQuestionsEnv(tokenizer, {**GAME, "error_allowance": 4})
    batch = env.run_trial(TASKS, agent, num_rollouts=2)
    rows, masks = batch["padded_full_token_ids"], batch["padded_full_attention_mask"]
    lengths = [sum(mask) for mask in masks]
    assert len(rows) == 4
    for task in (slice(0, 2), slice(2, 4)):
        assert [len(row) for row in rows[task]] == [max(lengths[task])] * 2
    assert lengths[0] != lengths[1]
    for row, mask, marked, rewards, length, session in zip(
        rows,
        masks,
        batch["padded_agent_token_mask"],
        batch["padded_per_token_rewards"],
        lengths,
        batch["session_ids"],
        strict=True,
    ):
        prompt, last = agent.heard[session][-1]
        assert list(row[:length]) == [*prompt, *last]
        assert list(mask) == [1] * length + [0] * (len(row) - length)
        assert set(row[length:]) <= {tokenizer.pad_token_id}
        assert set(marked[length:]) | set(rewards[length:]) <= {0}
        assert sum(marked) == sum(len(ids) for _, ids in agent.heard[session])


def test_a_tiny_policy_is_recorded_as_it_samples() -> None:
    env = TwentyQuestionsEnv(None, GAME)
    model, tokenizer = tiny_policy(env)
    agent = PolicyAgent(model, tokenizer, max_turn_tokens=6)
    for trajectory in TwentyQuestionsEnv(tokenizer, GAME).rollout(TASKS, agent, num_rollouts=2):
        assert trajectory.exact
        with torch.no_grad():
            logits = model(torch.tensor([trajectory.token_ids])).logits[0, :-1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(trajectory.token_ids[1:])[:, None])[:, 0]
        marked = torch.tensor(trajectory.agent_token_mask).bool()
        torch.testing.assert_close(torch.tensor(trajectory.logprobs)[marked], wanted[marked[1:]], atol=1e-5, rtol=1e-5)


CHATML = chat_tokenizer("chatml").chat_template
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
GEMMA_2 = NO_SYSTEM + CHATML
MISTRAL_NEMO = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content + '\n\n' %}{% elif m.role == 'user' %}<|im_start|>"
    "{{ ns.system if loop.last }}{{ m.content }}<|im_end|>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


def game_with(template: str, **config: Any) -> TwentyQuestionsEnv:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = template
    return TwentyQuestionsEnv(tokenizer, {**GAME, **config})


@pytest.mark.parametrize(
    ("template", "remedies"),
    [(GEMMA_2, {"system_prompt": ""}), (MISTRAL_NEMO, {"system_prompt": "", "history": "rerender"})],
)
def test_a_template_that_does_not_take_the_system_message_names_each_remedy_that_helps(
    template: str, remedies: dict[str, str]
) -> None:
    agent = ScriptedAgent(QUESTIONS)
    with pytest.raises(TemplateError) as error:
        game_with(template).rollout(TASKS, agent)
    for key, value in (("system_prompt", ""), ("history", "rerender")):
        assert (f'set env_config["{key}"] = "{value}"' in str(error.value)) is (key in remedies)
        if key in remedies:
            [trajectory, _] = game_with(template, **{key: value}).rollout(TASKS, agent)
            assert len(trajectory.turns) == 4
        else:
            with pytest.raises(TemplateError, match=r'System role not supported; .* set env_config\["system_prompt"\]'):
                game_with(template, **{key: value}).rollout(TASKS, agent)
