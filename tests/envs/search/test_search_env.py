"""SearchEnv in play: both formats, rewards, mistakes, retrievers of one's own, and its reference players."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentsgym import evaluate
from agentsgym.agents.base import Agent
from agentsgym.agents.scripted import ScriptedAgent
from agentsgym.envs.datasets.environments import make
from agentsgym.envs.Search import Passage, RandomPlayer, ReferencePlayer, SearchEnv
from agentsgym.errors import ConfigError, TaskError
from agentsgym.rollouts.process_pool import EnvProcessPool
from agentsgym.tiny import tiny_policy
from agentsgym.types import Action, StopReason, ToolCall, Trajectory

CORPUS = [
    {"title": "Dorvan Melik", "text": "Dorvan Melik works for Karvo Works."},
    {"title": "Karvo Works", "text": "The firm is based in Belmora."},
    {"title": "Belmora", "text": "Belmora is a town on the river Tarn."},
]
TASK = {
    "question": "On which river lies the town where the employer of Dorvan Melik is based?",
    "answers": ["Tarn", "river Tarn"],
    "evidence": ["Dorvan Melik", "Karvo Works", "Belmora"],
}


def call(query: Any = "Belmora", name: str = "search", **others: Any) -> ToolCall:
    return ToolCall(name=name, arguments={"query": query}, **others)


def played(*actions: str | Action, task: Any = TASK, **config: Any) -> Trajectory:
    corpus = {} if "retriever" in config else {"corpus": CORPUS, "top_k": 1}
    env = SearchEnv(None, {**corpus, **config})
    [trajectory] = env.rollout([task], ScriptedAgent([*actions], repeat_last=True))
    return trajectory


def searching(*queries: str) -> Action:
    return Action(text="", tool_calls=[call(query, id=f"c{n}") for n, query in enumerate(queries)])


def test_calls_are_answered_in_order_and_the_answer_ends_the_episode() -> None:
    trajectory = played(searching("Dorvan Melik", "zzz"), "Tarn")
    results = [message for message in trajectory.messages if message["role"] == "tool"]
    assert results == [
        {
            "role": "tool",
            "name": "search",
            "tool_call_id": "c0",
            "content": "[1] Dorvan Melik\nDorvan Melik works for Karvo Works.",
        },
        {"role": "tool", "name": "search", "tool_call_id": "c1", "content": "No passage matches."},
    ]
    assert trajectory.stop_reason is StopReason.DONE
    assert trajectory.turn_rewards == [0.0, 1.0]
    assert trajectory.info == {
        "success": True,
        "answer": "tarn",
        "exact_match": 1.0,
        "f1": 1.0,
        "num_searches": 2,
        "recall": pytest.approx(1 / 3),
        "num_calls": 2,
        "num_failed_calls": 0,
        "num_unreadable_calls": 0,
        "num_repaired_calls": 0,
        "num_raised_calls": 0,
        "tool_failed": False,
        "calls_read": {"parsed": 2},
    }


def test_tags_are_read_and_answered_as_search_r1_writes_them() -> None:
    trajectory = played(
        "<think>I <search>think</search></think><search> Belmora </search><answer>no</answer>",
        "So <answer>the Tarn</answer>",
        format="tags",
    )
    assert trajectory.messages[3] == {
        "role": "user",
        "content": "<information>Doc 1(Title: Belmora) Belmora is a town on the river Tarn.</information>",
    }
    assert trajectory.success is True


@pytest.mark.parametrize(
    ("action", "reported"),
    [
        ("It is in the corpus.", "neither a search nor an answer"),
        ("<search>Belmora", "neither a search nor an answer"),
        ("<search>  </search>", "The block <search> was empty"),
        ("<think><answer>Tarn</answer>", "neither"),
        (f"<search>{'x' * 1001}</search>", "may have 1000 characters, got 1001"),
    ],
)
def test_what_is_no_tag_is_invalid_and_names_what_would_be_right(action: str, reported: str) -> None:
    trajectory = played(action, format="tags", invalid_penalty=0.25)
    assert reported in trajectory.messages[3]["content"]
    assert [turn.invalid for turn in trajectory.turns] == [True, True]
    assert trajectory.turn_rewards == [-0.25, -0.25]
    assert trajectory.stop_reason is StopReason.INVALID


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        (call(name="serch"), "there is no tool 'serch'; did you mean 'search'?"),
        (call(query=3), "the argument 'query' of 'search' must be a string, got 3"),
        (call(query=" "), "the argument 'query' of 'search' must be a string of at least 1 characters, got ''"),
        (call(query="x" * 1001), "the argument 'query' of 'search' must be a string of at most 1000 characters"),
        (call(query=["Belmora"]), "the argument 'query' of 'search' must be a string, got ['Belmora']"),
        (ToolCall(name="search"), "the argument 'query' of 'search' is missing"),
        (ToolCall(name="search", arguments={"query": "Belmora", "k": 9}), "'search' has no argument 'k'"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_and_its_neighbor_made(wrong: ToolCall, reported: str) -> None:
    both = Action(text="", tool_calls=[wrong, call()])
    trajectory = played(both, "Tarn", invalid_penalty=0.5, search_cost=0.125)
    assert trajectory.messages[3]["content"].startswith(f"Error: {reported}")
    assert "river Tarn" in trajectory.messages[4]["content"]
    assert trajectory.turn_rewards == [-0.625, 1.0]
    assert not trajectory.turns[0].invalid  # it has done something
    alone = played(Action(text="", tool_calls=[wrong]), "Tarn", invalid_penalty=0.5)
    assert alone.turns[0].invalid
    assert alone.turn_rewards == [-0.5, 1.0]


def test_of_calls_that_cannot_be_read_one_message_speaks() -> None:
    wrong = [ToolCall(name="", error="it is not valid JSON")] * 2
    trajectory = played(Action(text="", tool_calls=[*wrong, call()]), "Tarn", invalid_penalty=0.5)
    [result] = [message for message in trajectory.messages if message["role"] == "tool"]
    assert result["content"].endswith("river Tarn.\n2 calls could not be read: it is not valid JSON")
    assert trajectory.turn_rewards == [-1.0, 1.0]
    alone = played(Action(text="", tool_calls=wrong), "Tarn", invalid_penalty=0.5)
    assert alone.messages[3] == {"role": "user", "content": "2 calls could not be read: it is not valid JSON"}
    assert alone.turn_rewards == [-1.0, 1.0]


def test_calls_beyond_the_limit_are_not_executed() -> None:
    trajectory = played(searching(*["Belmora"] * 100), "Tarn", max_calls_per_turn=2)
    assert trajectory.info["num_searches"] == 2
    results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert len(results) == 100
    assert set(results[2:]) == {"Error: not made, since a turn may have 2 calls"}
    trajectory = played(searching("Belmora", "Belmora"), max_calls_per_episode=1)
    assert trajectory.info["num_searches"] == 1
    assert trajectory.stop_reason is StopReason.DONE
    assert trajectory.success is False


def test_an_answer_that_was_cut_is_not_graded() -> None:
    trajectory = played(Action(text="Tarn", finish_reason="length"), "Tarn")
    assert [turn.invalid for turn in trajectory.turns] == [True, False]
    empty = played(" ", "Tarn", invalid_penalty=0.5)
    assert empty.messages[3]["content"] == "Call the search tool, or give the answer."
    assert empty.turn_rewards == [-0.5, 1.0]


def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


def test_other_tools_may_stand_beside_the_search() -> None:
    env = SearchEnv(None, {"corpus": CORPUS, "search_cost": 0.125, "submit_tool": "submit"}, tools=double)
    calls = [
        ToolCall(name="double", arguments={"number": 4}),
        call(),
        ToolCall(name="double", arguments={"number": ""}),
    ]
    submit = ToolCall(name="submit", arguments={"answer": "river Tarn"})
    agent = ScriptedAgent([Action(text="", tool_calls=calls), Action(text="", tool_calls=[submit])])
    [trajectory] = env.rollout([TASK], agent)
    results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert (results[0], results[2]) == ("8", "Error: the argument 'number' of 'double' must be an integer, got ''")
    assert trajectory.turn_rewards == [-0.125, 1.0]
    assert (trajectory.success, trajectory.info["num_searches"], trajectory.info["num_calls"]) == (True, 1, 2)


@pytest.mark.parametrize(("config", "tools"), [({}, double), ({"submit_tool": "submit"}, ())])
def test_the_tag_format_takes_no_other_tools(config: Any, tools: Any) -> None:
    with pytest.raises(ConfigError, match="format='tags' has no tool calls"):
        SearchEnv(None, {"corpus": CORPUS, "format": "tags", **config}, tools=tools)


def test_a_search_is_rewarded_as_any_call_too() -> None:
    trajectory = played(
        searching("Belmora"),
        Action(text="", tool_calls=[call(3)]),
        "Tarn",
        call_reward=0.25,
        failed_call_reward=-0.5,
        invalid_reward=-1.0,
    )
    assert trajectory.turn_rewards == [0.25, -1.5, 1.0]


def test_f1_and_evidence_are_rewarded_where_requested() -> None:
    again = searching("Belmora")
    trajectory = played(again, again, searching("Karvo"), "long Tarn", reward="f1", evidence_reward=0.3)
    assert trajectory.turn_rewards == pytest.approx([0.1, 0.0, 0.1, 2 / 3])
    assert trajectory.success is False


def test_the_last_turn_is_announced_and_the_budget_ends_the_episode() -> None:
    trajectory = played(searching("Belmora"), max_steps_per_episode=2)
    assert trajectory.messages[3]["content"].endswith("This is your last turn: answer now.")
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert trajectory.success is False


@pytest.mark.parametrize(
    "give",
    [
        lambda query, k: ["Belmora is on the Tarn."] * (k + 5),
        lambda query, k: ({"title": None, "text": "Belmora is on the Tarn."},),
        lambda query, k: [Passage("Belmora", "Belmora is on the Tarn.")],
    ],
)
def test_any_retriever_may_search(give: Callable[..., Any]) -> None:
    content = played(searching("Belmora"), "Tarn", retriever=give).messages[3]["content"]
    assert "Belmora is on the Tarn." in content
    assert content.count("[") <= 3


@pytest.mark.parametrize("nonsense", [None, "text", {"text": "x"}, 3, [3], [None], [{"title": "x"}], [{"text": b"x"}]])
def test_a_retriever_that_gives_nonsense_fails_its_episode_and_no_other(nonsense: Any) -> None:
    env = SearchEnv(None, {"retriever": lambda query, k: nonsense if query == "bad" else ["fine"]})
    agent = ScriptedAgent([searching("good"), "Tarn"])
    [failed] = env.rollout([TASK], ScriptedAgent([searching("bad")]))
    assert failed.failed
    assert "the retriever must return a list of passages" in str(failed.error)
    assert not env.rollout([TASK], agent)[0].failed


def test_a_retriever_that_raises_fails_its_episode() -> None:
    def broken(query: str, k: int) -> Any:
        raise OSError("the server is gone")

    trajectory = played(searching("Belmora"), retriever=broken)
    assert trajectory.failed
    assert "the retriever raised OSError: the server is gone" in str(trajectory.error)


@pytest.mark.parametrize("format_", ["tools", "tags"])
def test_a_retriever_that_hangs_is_given_up_and_the_agent_notified(format_: str) -> None:
    opened, requested = threading.Event(), []

    def hanging(query: str, k: int) -> list[str]:
        requested.append((query, k))
        if query == "bad":
            opened.wait(20)
        return [f"about {query}"]

    search = searching if format_ == "tools" else "<search>{}</search>".format
    answer = "Tarn" if format_ == "tools" else "<answer>Tarn</answer>"
    env = SearchEnv(None, {"retriever": hanging, "tool_timeout_s": 0.1, "format": format_, "search_cost": 0.25})
    for twin in (env, copy.deepcopy(env)):
        [trajectory] = twin.rollout([TASK], ScriptedAgent([search("bad"), search("good"), answer]))
        assert (trajectory.error, trajectory.success, trajectory.info["num_searches"]) == (None, True, 2)
        assert trajectory.turn_rewards == [-0.25, -0.25, 1.0]
        assert not any(turn.invalid for turn in trajectory.turns)
        reported = [message["content"] for message in trajectory.messages[3:6:2]]
        assert reported[0] == "Error: search took longer than 0.1 s, and was given up"
        assert "about good" in reported[1]
    assert requested == [("bad", 3), ("good", 3)] * 2
    opened.set()


def test_a_retriever_without_a_limit_is_called_where_the_environment_is() -> None:
    threads: list[int] = []

    def seen(query: str, k: int) -> list[str]:
        threads.append(threading.get_ident())
        return [query]

    played(searching("x"), retriever=seen, tool_timeout_s=None)
    played(searching("x"), retriever=seen)
    assert [one == threading.get_ident() for one in (threads[0], threads[-1])] == [True, False]


def test_long_passages_are_cut() -> None:
    content = played(searching("x"), retriever=lambda query, k: ["y" * 10_000_000], max_passage_chars=50).messages[3]
    assert content["content"] == f"[1] {'y' * 49}…"


@pytest.mark.parametrize("format_", ["tools", "tags"])
def test_the_reference_player_finds_every_answer_and_chance_hardly_any(format_: str) -> None:
    config = {"format": format_}
    env, rows = SearchEnv(None, config), SearchEnv.get_eval_dataset(config)
    reference, chance = evaluate(env, ReferencePlayer(env), rows), evaluate(env, RandomPlayer(env), rows)
    assert reference.win_rate is not None
    assert reference.win_rate.mean == 1.0
    assert {one.info["recall"] for one in reference.trajectories} == {1.0}
    assert chance.win_rate is not None
    assert chance.win_rate.mean < 0.1
    assert chance.num_failed == 0


def test_players_go_on_to_a_next_episode() -> None:
    env = SearchEnv(None, {"episodes_per_trial": 2, "keep_history": True})
    [trajectory] = env.rollout([SearchEnv.get_eval_dataset(size=1)[0]["task_data"]], ReferencePlayer(env))
    assert trajectory.final_reward == 2.0


def test_training_and_evaluation_have_questions_about_other_people() -> None:
    parts = [SearchEnv.get_train_dataset(hops=[3]), SearchEnv.get_eval_dataset(hops=[3])]
    people = [{row["task_data"]["evidence"][0] for row in part} for part in parts]
    assert not people[0] & people[1]
    assert len(people[0] | people[1]) == 200
    assert {len(row["task_data"]["evidence"]) for row in parts[0]} == {3}
    seeds = [{row["task_data"]["seed"] % 2 for row in part} for part in parts]
    assert seeds == [{0}, {1}]


def test_rows_build_their_environment() -> None:
    row = SearchEnv.get_train_dataset({"format": "tags", "world": {"num_people": 5}}, size=3)[0]
    env = make(row)
    assert isinstance(env, SearchEnv)
    assert env.rollout([row], ReferencePlayer(env))[0].success


def test_questions_of_ones_own_are_read_by_their_columns() -> None:
    data = [{"problem": f"q{n}?", "golden_answers": "Tarn" if n else ["Tarn", "the Tarn"]} for n in range(10)]
    rows = SearchEnv.get_train_dataset(
        {"corpus": CORPUS}, data=data, columns={"question": "problem", "answers": "golden_answers"}, split="all"
    )
    assert {row["task_data"]["question"] for row in rows} == {f"q{n}?" for n in range(10)}
    assert all("Tarn" in row["task_data"]["answers"] for row in rows)
    with pytest.raises(ConfigError, match=r"data\[0\] has no column 'question', from which 'question' is read"):
        SearchEnv.get_train_dataset({"corpus": CORPUS}, data=data)
    with pytest.raises(ConfigError, match="has no built-in questions: pass questions as data"):
        SearchEnv.get_train_dataset({"corpus": CORPUS})


@pytest.mark.parametrize(
    ("task", "error"),
    [
        ({}, "'question'"),
        ({"question": " ", "answers": ["x"]}, "'question'"),
        ({"question": "q", "answers": []}, "'answers'"),
        ({"question": "q", "answers": "x"}, "'answers'"),
        ({"question": "q", "answers": ["x"], "evidence": "y"}, "'evidence'"),
        ({"question": "q", "answers": ["x"], "evidenc": []}, "did you mean 'evidence'"),
    ],
)
def test_tasks_are_checked(task: Any, error: str) -> None:
    with pytest.raises(TaskError, match=error):
        SearchEnv().check_task(task)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"format": "xml"}, "must be one of 'tools', 'tags'"),
        ({"world": {"num_peple": 3}}, "did you mean 'num_people'"),
        ({"world": {"seed": 1}, "corpus": CORPUS}, "applies to the generated corpus"),
        ({"retriever": len, "corpus": CORPUS}, "'corpus' and 'retriever'"),
        ({"corpus": []}, "at least one row"),
        ({"corpus": [{"body": "x"}]}, r"the corpus\[0\] has no column 'text'"),
        ({"corpus": [{"text": "x"}], "corpus_columns": {"title": "name"}}, "has no column 'name'"),
        ({"corpus": [{"text": "x"}], "corpus_columns": {"titel": "name"}}, "did you mean 'title'"),
        ({"corpus": [{"text": 3}]}, r"the corpus\[0\]\['text'\] must be a str, got 3"),
        ({"corpus": "/no/such/file.jsonl"}, "cannot be read"),
        ({"corpus": 3}, "must be 'generated', the path"),
        ({"corpus": CORPUS, "stopwords": "klingon"}, r"env_config\['stopwords'\] must be a language"),
    ],
)
def test_bad_configurations_are_refused(config: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        SearchEnv(None, config)


def test_a_tiny_policy_is_made_of_played_episodes_where_the_corpus_is_another_one() -> None:
    env = SearchEnv(None, {"corpus": CORPUS, "top_k": 1})
    agent = ScriptedAgent([searching("Belmora"), "The river Tarn"])
    _, tokenizer = tiny_policy(env, tasks=[TASK], agent=agent, num_episodes=1)
    for text in (TASK["question"], "Belmora is a town on the river Tarn.", "The river Tarn"):
        assert tokenizer.unk_token_id not in tokenizer(text).input_ids, text


def test_it_plays_in_processes_too() -> None:
    env = SearchEnv()
    tasks = SearchEnv.get_eval_dataset(size=4)
    assert pickle.loads(pickle.dumps(env)).search("river")  # opened again where it arrives
    with EnvProcessPool(1) as pool:
        assert all(one.success for one in env.rollout(tasks, ReferencePlayer(env), pool=pool))


def test_calls_and_tools_reach_worker_processes_and_their_agents() -> None:
    class Caller(Agent):
        def act(self, requests: Any) -> Any:
            for request in requests:
                tools.append([schema["function"]["name"] for schema in request.tools])
            return [Action(text="Tarn") if one.agent_state else first for one in requests]

    tools: list[list[str]] = []
    first = Action(text="", tool_calls=[call()], agent_state=1)
    env = SearchEnv(None, {"corpus": CORPUS})
    with EnvProcessPool(1) as pool:
        [trajectory] = env.rollout([TASK], Caller(), pool=pool)
    assert trajectory.info["num_searches"] == 1
    assert tools == [["search"], ["search"]]
