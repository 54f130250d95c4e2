import random
import re
from dataclasses import replace
from typing import Any

import pytest
from guess_game import MISS, WIN, Chatty, Counting, GuessEnv, bare, tasks
from hypothesis import given, settings
from hypothesis import strategies as st

from agentsgym.agents.base import Agent
from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.batch.views import flatten
from agentsgym.errors import ConfigError, TaskError
from agentsgym.testing import chat_tokenizer
from agentsgym.tiny import tiny_policy
from agentsgym.types import Action, Message, StopReason, Trajectory

TOKENIZER = chat_tokenizer("chatml")
PADDED = ("padded_full_token_ids", "padded_full_attention_mask", "padded_agent_token_mask", "padded_per_token_rewards")


class Uneven(Agent):
    """Needs one guess more in each further rollout."""

    def __init__(self, solution: int) -> None:
        self.solution, self.detours = solution, -1

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        if agent_state is None:
            self.detours += 1
            agent_state = self.detours
        return (str(self.solution + 1) if agent_state else str(self.solution)), agent_state - 1


def test_run_trial_pads_each_task_to_its_own_longest() -> None:
    env = GuessEnv(TOKENIZER)
    result = env.run_trial(tasks(2, 5, 2), Counting(), num_rollouts=2)
    lengths = [[len(row) for row in result[key]] for key in PADDED]
    assert lengths[0] == lengths[1] == lengths[2] == lengths[3]
    assert lengths[0][0] == lengths[0][1] == lengths[0][4] < lengths[0][2]
    assert env.num_initialized == 6


def test_rows_of_one_task_differ_and_are_padded_with_the_padding_values() -> None:
    env = GuessEnv(TOKENIZER)
    trajectories = env.rollout(tasks(4), Uneven(4), 3)
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    assert len(set(lengths)) == 3
    result = env.run_trial(tasks(4), Uneven(4), 3)
    for n, trajectory in enumerate(trajectories):
        fill = max(lengths) - lengths[n]
        ids, attention, mask, rewards = (result[key][n] for key in PADDED)
        assert ids[: lengths[n]] == trajectory.token_ids
        assert ids[lengths[n] :] == [TOKENIZER.pad_token_id] * fill
        assert attention == [1] * lengths[n] + [0] * fill
        assert mask == trajectory.agent_token_mask + [0] * fill
        assert rewards == [*trajectory.per_token_rewards, *[0.0] * fill]
    assert result["final_rewards"] == [WIN, MISS + WIN, 2 * MISS + WIN]


def test_rows_come_task_major_with_one_start_a_rollout() -> None:
    env = GuessEnv(TOKENIZER, {"max_steps_per_episode": 4})
    result = env.run_trial(tasks(3, 9), Counting(), num_rollouts=3, max_concurrent=2)
    assert env.num_initialized == 6
    assert result["stop_reasons"] == [StopReason.DONE] * 3 + [StopReason.MAX_TURNS] * 3
    assert result["final_rewards"] == [2 * MISS + WIN] * 3 + [4 * MISS] * 3
    assert len(set(result["session_ids"])) == 6
    for messages, num_turns in zip(result["final_completion_messages"], [3] * 3 + [4] * 3, strict=True):
        assert [message["content"] for message in messages[1::2]] == ["1", "2", "3", "4"][:num_turns]
    assert {len(value) for value in result.values()} == {6}
    widths = [len(row) for row in result["padded_full_token_ids"]]
    assert len(set(widths[:3])) == len(set(widths[3:])) == 1
    assert widths[0] < widths[3]
    assert env.active_states == env._generators == {}


def test_trajectories_know_their_task_and_rollout() -> None:
    trajectories = GuessEnv().rollout(tasks(1, 2), Counting(), 2)
    assert [(one.task_index, one.rollout_index) for one in trajectories] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_request_has_every_field() -> None:
    class Checking(ScriptedAgent):
        def act(self, requests: Any) -> Any:
            assert all(replace(one) == one and repr(one) == repr(replace(one)) for one in requests)
            return super().act(requests)

    [rollout] = GuessEnv().rollout(tasks(3), Checking(["3"]))
    assert rollout.error is None


def test_a_small_policy_plays_two_tasks_twice() -> None:
    texts = ["Guess a number from 1 to 9.", "That is no number. Higher Lower.", *map(str, range(100))]
    texts += [f" {number}" for number in range(100)]
    model, tokenizer = tiny_policy(texts)
    env = GuessEnv(tokenizer, {"max_steps_per_episode": 5, "error_allowance": 3})
    agent = PolicyAgent(model, tokenizer, seed=1)
    seen: list[Trajectory] = []
    result = env.run_trial(tasks(3, 9), agent, num_rollouts=2, max_turn_tokens=6, on_finish=seen.append)
    assert [len(value) for value in result.values()] == [4] * len(result)
    assert len(seen) == 4
    for trajectory in seen:
        assert trajectory.error is None
        assert trajectory.exact
        assert trajectory.logprobs is not None
        assert len(trajectory.logprobs) == len(trajectory.token_ids)
        assert all(1 <= turn.stop - turn.start <= 6 for turn in trajectory.turns)
        for turn in trajectory.turns:
            assert all(value < 0.0 for value in trajectory.logprobs[turn.start : turn.stop])
            assert replace(turn) == turn
            assert repr(replace(turn)) == repr(turn)
            output = trajectory.messages[turn.message_index]["content"]
            assert tokenizer.decode(trajectory.token_ids[turn.start : turn.stop], skip_special_tokens=True) == output
    assert env.active_states == {}


def test_generate_nests_turns_whose_prompts_extend_each_other() -> None:
    env = GuessEnv(TOKENIZER)
    nested = env.generate(tasks(3, 1), Counting(), num_rollouts=2, return_all_steps=True)
    assert [len(rollout) for rollout in nested["ids"]] == [3, 3, 1, 1]
    assert all([len(rollout) for rollout in value] == [3, 3, 1, 1] for value in nested.values())
    for p, rollout in enumerate(nested["ids"]):
        for k, ids in enumerate(rollout):
            assert nested["mask"][p][k] == [1] * len(ids)
            assert TOKENIZER.decode(ids) == f"{k + 1}<|im_end|>"
            assert len(nested["messages"][p][k]) == 2 * (k + 1)
            assert nested["messages"][p][k][-1] == {"role": "assistant", "content": str(k + 1)}
            if k + 1 < len(rollout):
                spoken = [*nested["prompt_ids"][p][k], *ids]
                assert nested["prompt_ids"][p][k + 1][: len(spoken)] == spoken
    assert nested["rewards"] == [[MISS, MISS, WIN]] * 2 + [[WIN]] * 2
    assert len({session for sessions in nested["session_ids"] for session in sessions}) == 4


def test_run_trial_and_generate_give_the_log_probabilities_and_each_tokens_reward() -> None:
    def output(text: str) -> Action:
        ids = [*TOKENIZER(text, add_special_tokens=False).input_ids, TOKENIZER.eos_token_id]
        return Action(text=text, token_ids=ids, logprobs=[-0.5 * (index + 1) for index in range(len(ids))])

    env, agent = GuessEnv(TOKENIZER), ScriptedAgent([output("5"), output("3")])
    [trajectory] = env.rollout(tasks(3), agent)
    assert env.run_trial(tasks(3), agent)["padded_logprobs"] == [trajectory.logprobs]
    assert env.run_trial(tasks(3), Counting())["padded_logprobs"] == [None]
    nested = env.generate(tasks(3), agent, return_all_steps=True)
    spans = [slice(turn.start, turn.stop) for turn in trajectory.turns]
    assert nested["logprobs"] == [[[-0.5, -1.0]] * 2] == [[(trajectory.logprobs or [])[span] for span in spans]]
    assert nested["per_token_rewards"] == [[list(trajectory.per_token_rewards[span]) for span in spans]]
    assert [sum(rewards) for rewards in nested["per_token_rewards"][0]] == nested["rewards"][0] == [MISS, WIN]
    assert env.generate(tasks(3), Counting())["logprobs"] == [[None]]


def test_generate_is_flattened_with_a_map_and_cut_to_the_last_turn() -> None:
    env = GuessEnv(TOKENIZER)
    flat = flatten(env.generate(tasks(3, 1, 2), Counting(), return_all_steps=True))
    assert flat["episode_idx_map"] == [0, 0, 0, 1, 2, 2]
    assert flat["rewards"] == [MISS, MISS, WIN, WIN, MISS, WIN]
    assert {len(value) for value in flat.values()} == {6}
    last = env.generate(tasks(3, 1, 2), Counting())
    assert last["rewards"] == [[WIN]] * 3
    assert [len(messages) for [messages] in last["messages"]] == [6, 2, 4]
    assert [TOKENIZER.decode(ids) for [ids] in last["ids"]] == ["3<|im_end|>", "1<|im_end|>", "2<|im_end|>"]


@settings(max_examples=40)
@given(
    seeds=st.lists(st.integers(-3, 3), min_size=1, max_size=4),
    num_rollouts=st.integers(1, 3),
    max_concurrent=st.none() | st.integers(1, 5),
    episodes=st.integers(1, 3),
    keep_history=st.booleans(),
)
def test_a_game_does_not_depend_on_what_is_played_beside_it(
    seeds: list[int], num_rollouts: int, max_concurrent: int | None, episodes: int, keep_history: bool
) -> None:
    config = {"max_steps_per_episode": 6, "episodes_per_trial": episodes, "keep_history": keep_history}
    env = GuessEnv(TOKENIZER, config)
    alone = {seed: bare(GuessEnv(TOKENIZER, config).rollout([{"seed": seed}], Chatty())[0]) for seed in set(seeds)}
    together = env.rollout([{"seed": seed} for seed in seeds], Chatty(), num_rollouts, max_concurrent=max_concurrent)
    assert [bare(one) for one in together] == [alone[seed] for seed in seeds for _ in range(num_rollouts)]
    assert env.active_states == {}


def test_different_seeds_are_different_games() -> None:
    env = GuessEnv(env_config={"highest": 10_000})
    trajectories = env.rollout([{"seed": seed} for seed in range(20)], ScriptedAgent(["1"], repeat_last=True))
    assert len({one.messages[2]["content"] for one in trajectories}) > 10


def solutions(env: GuessEnv, task_list: list[Any], num_rollouts: int) -> list[int]:
    trials = env.trials(task_list, num_rollouts)
    return [env.start_session(trial.session_id, trial.task_data, trial.seed)["solution"] for trial in trials]


def test_a_task_group_shares_its_start_and_a_task_without_seed_gets_a_fresh_one() -> None:
    env = GuessEnv(env_config={"highest": 10**12})
    task = {"seed": None}
    first, second = solutions(env, [{}, task], 3), solutions(env, [{}, task], 3)
    for start in (first, second):
        assert len(set(start[:3])) == len(set(start[3:])) == 1
    assert len({*first, *second}) == 4
    assert task == {"seed": None}
    assert solutions(env, [{"seed": 5}], 2) == solutions(env, [{"seed": 5}], 1) * 2


def test_the_seed_is_handed_to_the_game() -> None:
    env = GuessEnv()
    [one, other] = env.trials([{"extra": 1}], 2)
    assert one.task_data == other.task_data == {"extra": 1, "seed": one.seed}


def test_sessions_share_neither_state_nor_draws_nor_task() -> None:
    class Scribbler(GuessEnv):
        """Writes into everything that it is given."""

        def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> dict[str, Any]:
            task_data["notes"].append("seen")
            state = super()._initialize_episode(session_id, task_data)
            return {**state, "notes": task_data["notes"]}

        def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
            state["notes"].append(action)
            state, reward, done, info = super()._step_episode(session_id, state, action)
            return state, reward, done, {**info, "notes": list(state["notes"])}

    task = {"solution": 2, "seed": 1, "notes": ["mine"]}
    trajectories = Scribbler().rollout([task], Counting(), 3)
    assert [one.info["notes"] for one in trajectories] == [["mine", "seen", "1", "2"]] * 3
    assert task == {"solution": 2, "seed": 1, "notes": ["mine"]}


def test_a_generator_belongs_to_its_session() -> None:
    env = GuessEnv()
    one, other = env.rng("one"), env.rng("other")
    assert env.rng("one") is one
    assert one.random() != other.random()
    env.start_session("one", {}, seed=4)
    env.start_session("other", {}, seed=4)
    assert env.rng("one").random() == env.rng("other").random()
    env.drop_session("one")
    env.drop_session("never started")
    assert env.active_states.keys() == {"other"}


def test_global_randomness_is_neither_read_nor_changed() -> None:
    def played() -> list[Trajectory]:
        return [bare(one) for one in GuessEnv().rollout([{"seed": 1}], Chatty(), 2)]

    random.seed(1)
    state, first = random.getstate(), played()
    assert random.getstate() == state
    random.seed(2)
    assert played() == first


@pytest.mark.parametrize(
    ("task_list", "message"),
    [
        ([], "at least one task, got an empty list"),
        ([{}, 3], r"task_data_list\[1\] must be a task_data dict or a dataset row, got 3"),
        ((), "at least one task, got an empty list"),
        *[
            (value, "task_data_list must be a list of task_data dicts, got " + re.escape(repr(value)))
            for value in (None, 5, "clock", {"solution": 3})
        ],
        ([{"seed": "a"}], r"task_data_list\[0\]\['seed'\] must be an int or None, got 'a'"),
        ([{"seed": 1.0}], "must be an int or None, got 1.0"),
        ([{"seed": True}], "must be an int or None, got True"),
        ([{"solution": 3}, {"solution": "x"}], r"task_data\['solution'\] must be an int, got 'x'"),
    ],
)
def test_a_bad_task_is_refused_before_anything_is_played(task_list: Any, message: str) -> None:
    env = GuessEnv()
    with pytest.raises(TaskError, match=message):
        env.rollout(task_list, Counting())
    assert env.num_initialized == 0


@pytest.mark.parametrize(
    ("options", "kind", "problem"),
    [
        *(
            ({"num_rollouts": number}, ConfigError, f"num_rollouts must be a positive int, got {number}")
            for number in (0, -1, 1.0, None, True)
        ),
        ({"max_turn_tokens": 0}, ConfigError, "token budget of a turn must be a positive int or None, got"),
        ({"max_turn_tokens": "5"}, ConfigError, "token budget of a turn must be a positive int or None, got"),
        (
            {"max_completion_length": -1},
            ConfigError,
            "token budget of a completion must be a positive int or None, got",
        ),
        ({"max_tokens": 3}, TypeError, "max_tokens"),
    ],
)
def test_bad_numbers_and_unknown_limits_are_refused(options: Any, kind: Any, problem: str) -> None:
    with pytest.raises(kind, match=problem):
        GuessEnv().rollout(tasks(3), Counting(), **options)


def test_a_game_without_tasks_of_its_own_reports_it() -> None:
    for method in (GuessEnv.get_train_dataset, GuessEnv.get_eval_dataset):
        with pytest.raises(NotImplementedError, match="GuessEnv ships no"):
            method()
