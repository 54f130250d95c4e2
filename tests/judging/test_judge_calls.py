"""How a judge's agent is called: within limits, retried, cached, with its cost counted."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from http_server import Asked, Reply, calling, chat
from judged_games import Greeting, ScriptedJudge, WaitingJudge, conversation, longest_first

from agentsgym import (
    Agent,
    AsyncAgent,
    ConfigError,
    Criterion,
    Judge,
    JudgeError,
    PolicyAgent,
    ScriptedAgent,
    tiny_policy,
)
from agentsgym.agents.openai import OpenAIAgent
from agentsgym.agents.usage import Meter
from agentsgym.event_loop import agents_loop
from agentsgym.judging.prompts import group_question, text_question
from agentsgym.types import Action, TurnRequest

YES = {"reason": "So it is.", "polite": True}
POLITE = {"polite": "Is the agent polite?"}
PLAYED = conversation("A guest.", "hello")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"scope": "game"}, r"Judge\(scope\) cannot be 'game'"),
        ({"name": ""}, r"Judge\(name\) must be a non-empty string, got ''"),
        ({"on_judge_failure": 2}, r"Judge\(on_judge_failure\) must be a number in \[0, 1\] or None, got 2"),
        ({"max_concurrent": 0}, r"Judge\(max_concurrent\) must be a positive int, got 0"),
        ({"timeout_s": 0}, r"Judge\(timeout_s\) must be a positive number of seconds, got 0"),
        ({"max_characters": 10}, r"Judge\(max_characters\) must be an int of at least 1000, got 10"),
        ({"reference": 1}, r"Judge\(reference\) must be a key of task_data or None, got 1"),
        ({"cache": 1}, r"Judge\(cache\) must be a folder or None, got 1"),
        ({"cache": "answers"}, "cache requires agent_name, a name for ScriptedJudge"),
        ({"rubric": {}}, "rubric must be"),
    ],
)
def test_a_bad_argument_is_refused_in_a_sentence(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Judge(ScriptedJudge(lambda _: YES), **{"rubric": POLITE, **options})


def test_anything_but_an_agent_is_refused() -> None:
    with pytest.raises(ConfigError, match="an agent must define get_action"):
        Judge("gpt", rubric=POLITE)


def test_a_cache_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache='.*file' cannot be used as a folder"):
        Judge(ScriptedAgent(["x"]), rubric=POLITE, cache=str(tmp_path / "file"), agent_name="script")


def test_an_answer_that_cannot_be_read_is_requested_once_more() -> None:
    agent = ScriptedAgent(["Very polite!", json.dumps(YES)])
    judgment = Judge(agent, rubric=POLITE).judge_episode(PLAYED)
    assert (judgment.values, judgment.calls, judgment.reason) == ({"polite": 1.0}, 2, "So it is.")
    assert (judgment.repeats, Judge(ScriptedAgent([json.dumps(YES)]), rubric=POLITE).judge_episode(PLAYED).repeats) == (
        1,
        0,
    )


def test_the_second_request_names_what_was_wrong() -> None:
    agent = ScriptedJudge(lambda prompt: YES if "lacks 'polite'" in prompt else {"rude": False})
    Judge(agent, rubric=POLITE).judge_episode(PLAYED)
    assert agent.prompts[1].startswith(agent.prompts[0])
    assert "This answer cannot be read: its JSON object lacks 'polite'." in agent.prompts[1]


def test_two_answers_that_cannot_be_read_fail_the_judgment(caplog: pytest.LogCaptureFixture) -> None:
    agent = ScriptedJudge(lambda _: "Very polite!")
    sentence = (
        r"judge 'manners' \(ScriptedJudge\) gave two answers that cannot be read: of the second, it is not one "
        "valid JSON object and nothing else: 'Very polite!'"
    )
    with pytest.raises(JudgeError, match=sentence):
        Judge(agent, rubric=POLITE, name="manners").judge_episode(PLAYED)
    assert len(agent.prompts) == 2
    assert "an answer of ScriptedJudge cannot be read" in caplog.text
    assert caplog.text.count("'Very polite!'") == 1  # the first as a warning


def test_a_failure_may_have_a_number() -> None:
    judgment = Judge(ScriptedJudge(lambda _: "?"), rubric=POLITE, on_judge_failure=0.25).judge_episode(PLAYED)
    assert judgment.values == judgment.scores == {"polite": 0.25}
    assert "cannot be read" in str(judgment.error)
    assert (judgment.answers, judgment.repeats) == (["?"], 1)


def test_an_answer_that_was_cut_off_does_not_count() -> None:
    cut = Action(text=json.dumps(YES), finish_reason="length")
    judge = Judge(ScriptedAgent([cut, cut]), rubric=POLITE)
    with pytest.raises(JudgeError, match="cut off at the token limit"):
        judge.judge_episode(PLAYED)


class Faulty(Agent):
    """Raises a few times, then answers."""

    def __init__(self, num_faults: int) -> None:
        self.num_faults = num_faults
        self.num_calls = 0

    def get_action(self, messages: list[Any], agent_state: Any) -> tuple[str, Any]:
        self.num_calls += 1
        if self.num_calls <= self.num_faults:
            raise OSError("the line is dead")
        return json.dumps(YES), None


def test_a_call_that_fails_is_repeated_within_bounds() -> None:
    agent = Faulty(2)
    judgment = Judge(agent, rubric=POLITE, max_retries=2, retry_delay_s=0).judge_episode(PLAYED)
    assert (judgment.values, judgment.calls) == ({"polite": 1.0}, 3)
    with pytest.raises(JudgeError, match=r"judge 'judge' .Faulty. failed: .*OSError: the line is dead"):
        Judge(Faulty(3), rubric=POLITE, max_retries=2, retry_delay_s=0).judge_episode(PLAYED)


def test_something_that_is_no_action_is_a_failure() -> None:
    class Mute(Agent):
        def act(self, requests: Any) -> Any:
            return [None for _ in requests]

    with pytest.raises(JudgeError, match="Mute must return an Action with a text, got None"):
        Judge(Mute(), rubric=POLITE, max_retries=0).judge_episode(PLAYED)


def test_an_agent_that_cannot_be_used_at_all_ends_the_run() -> None:
    class Refused(Agent):
        def act(self, requests: Any) -> Any:
            raise ConfigError("the key was rejected")

    with pytest.raises(ConfigError, match="the key was rejected"):
        Judge(Refused(), rubric=POLITE, on_judge_failure=0.5).judge_episode(PLAYED)


def test_an_asynchronous_agent_that_takes_too_long_is_canceled() -> None:
    agent = WaitingJudge(lambda _: YES, seconds=30)
    began = time.monotonic()
    with pytest.raises(JudgeError, match=r"WaitingJudge took longer than timeout_s = 0\.05"):
        Judge(agent, rubric=POLITE, timeout_s=0.05, max_retries=1, retry_delay_s=0).judge_episode(PLAYED)
    assert time.monotonic() - began < 5
    assert (agent.num_calls, agent.num_open) == (2, 0)


def judge_many(judge: Judge, number: int) -> list[Any]:
    with ThreadPoolExecutor(number) as pool:
        return [*pool.map(judge.judge_episode, [conversation("A guest.", f"hello {n}") for n in range(number)])]


def test_asynchronous_calls_are_open_at_once_within_the_limit() -> None:
    agent = WaitingJudge(lambda _: YES, seconds=0.05)
    assert len(judge_many(Judge(agent, rubric=POLITE, max_concurrent=4), 16)) == 16
    assert agent.most_open == 4


def test_requests_to_any_other_agent_are_answered_in_batches() -> None:
    class Slow(ScriptedJudge):
        def act(self, requests: Any) -> Any:
            time.sleep(0.02)
            return super().act(requests)

    agent = Slow(lambda _: YES)
    judgments = judge_many(Judge(agent, rubric=POLITE, max_concurrent=8), 16)
    assert [one.values for one in judgments] == [{"polite": 1.0}] * 16
    assert sum(agent.batches) == 16
    assert 1 < max(agent.batches) <= 8


def test_a_judgment_that_is_canceled_does_not_wait_for_its_answer() -> None:
    agent = WaitingJudge(lambda _: YES, seconds=30)
    judgment = asyncio.run_coroutine_threadsafe(Judge(agent, rubric=POLITE).ajudge(PLAYED), agents_loop())
    began = time.monotonic()
    while not agent.num_open:
        time.sleep(0.01)
    judgment.cancel()
    while agent.num_open:
        time.sleep(0.01)
    assert time.monotonic() - began < 5
    assert agent.num_calls == 1


def test_an_answer_is_kept_by_its_request(tmp_path: Path) -> None:
    agent = ScriptedJudge(lambda _: YES)

    def judge(**changes: Any) -> Judge:
        return Judge(agent, **{"rubric": POLITE, "cache": tmp_path, "agent_name": "scripted", **changes})

    first, second = judge().judge_episode(PLAYED), judge().judge_episode(PLAYED)
    assert (first.calls, first.cached, second.calls, second.cached) == (1, 0, 0, 1)
    assert first.values == second.values
    assert first.reason == second.reason
    for other in (judge(rubric={"polite": "Really?"}), judge(agent_name="other"), judge(seed=1)):
        assert other.judge_episode(PLAYED).calls == 1
    assert judge().judge_episode(conversation("A guest.", "good day")).calls == 1
    kept = json.loads(next(tmp_path.rglob("*.json")).read_text())
    assert (kept.keys(), json.loads(kept["answer"])) == ({"messages", "answer"}, YES)


QUOTING = json.dumps({"answer": f"It wrote {json.dumps(YES)}."})  # which earlier versions accepted


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"answer": 7}', QUOTING, "[" * 100_000])
def test_a_damaged_file_of_the_cache_is_generated_again(tmp_path: Path, damage: str) -> None:
    judge = Judge(ScriptedJudge(lambda _: YES), rubric=POLITE, cache=tmp_path, agent_name="scripted")
    judge.judge_episode(PLAYED)
    [file] = tmp_path.rglob("*.json")
    file.write_text(damage)
    assert judge.judge_episode(PLAYED).calls == 1
    assert judge.judge_episode(PLAYED).cached == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_answer_that_cannot_be_read_is_not_kept(tmp_path: Path) -> None:
    judge = Judge(ScriptedJudge(lambda _: "?"), rubric=POLITE, cache=tmp_path, agent_name="s", on_judge_failure=0)
    judge.judge_episode(PLAYED)
    assert not [*tmp_path.rglob("*.json")]


def test_tokens_that_an_agent_reports_are_counted_per_judgment() -> None:
    class Metered(AsyncAgent):
        def __init__(self) -> None:
            self.meter = Meter(None)

        async def aact(self, request: TurnRequest) -> Action:
            number = 5 if "hello 1" in request.messages[-1]["content"] else 3
            self.meter.add_body({"usage": {"prompt_tokens": 10 * number, "completion_tokens": number}})
            return Action(text=json.dumps(YES))

    judgments = judge_many(Judge(Metered(), rubric=POLITE), 3)
    assert [one.tokens for one in judgments] == [33, 55, 33]
    assert Judge(ScriptedJudge(lambda _: YES), rubric=POLITE).judge_episode(PLAYED).tokens is None


def test_tokens_of_a_server_are_counted_per_judgment() -> None:
    pytest.importorskip("openai")

    def reply(requested: Asked) -> Reply:
        number = 7 if "hello 1" in requested.output_last else 3
        return chat(json.dumps(YES), usage={"prompt_tokens": number, "completion_tokens": 1})

    with calling(reply, token_ids=False) as (agent, served):
        judgments = judge_many(Judge(agent, rubric=POLITE), 3)
    assert [one.tokens for one in judgments] == [4, 8, 4]
    assert served.requested[0].body["messages"][0]["role"] == "system"


def test_a_server_gets_the_schema_of_the_verdict_until_it_rejects_it(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("openai")
    accepts, given = True, list[Any]()

    def reply(requested: Asked) -> Reply:
        given.append(requested.body.get("response_format"))
        if given[-1] is not None and not accepts:
            return Reply(status=400, body={"error": {"message": "response_format is not supported"}})
        return chat(json.dumps(YES))

    with calling(reply, token_ids=False) as (agent, _):
        judge = Judge(agent, rubric=POLITE)
        assert judge.judge_episode(PLAYED).values == {"polite": 1.0}
        accepts = False
        assert [judge.judge_episode(PLAYED).repeats for _ in range(2)] == [0, 0]
    schema = given[0]["json_schema"]["schema"]
    assert (schema["properties"]["polite"], schema["required"]) == ({"type": "boolean"}, ["reason", "polite"])
    assert given == [given[0], given[0], None, None]
    assert caplog.text.count("rejects the JSON schema of an answer (status 400") == 1


def test_the_schema_of_a_verdict_names_scales_and_rankings() -> None:
    graded = text_question("A text.", [Criterion("clear", "?", scale=(1, 5))], max_characters=1000).schema
    assert graded["properties"]["clear"] == {"type": "number", "minimum": 1, "maximum": 5}
    group = [conversation("A guest.", "hello"), conversation("A guest.", "bye")]
    ranked = group_question(group, [1, 0], [Criterion("best", "?")], reference=None, max_characters=1000).schema
    assert ranked["properties"]["best"]["items"]["anyOf"][0] == {"type": "integer"}


def test_a_policy_judges_with_exact_tokens() -> None:
    env = Greeting()
    model, tokenizer = tiny_policy(env, tasks=[{"seed": 0}], agent=ScriptedAgent(["hello", "hello"]), hidden_size=16)
    agent = PolicyAgent(model, tokenizer, max_turn_tokens=3)
    judgment = Judge(agent, rubric=POLITE, on_judge_failure=0.0).judge_episode(PLAYED)
    assert (judgment.values, judgment.calls) == ({"polite": 0.0}, 2)
    assert judgment.tokens is not None
    assert judgment.tokens > 10


def test_a_model_on_a_server_names_itself_in_the_cache() -> None:
    pytest.importorskip("openai")
    make = {"base_url": "http://localhost:1/v1", "temperature": 0.0}
    name = Judge(OpenAIAgent("small", **make), rubric=POLITE).agent_name
    assert name == Judge(OpenAIAgent("small", **make), rubric=POLITE).agent_name
    assert name != Judge(OpenAIAgent("large", **make), rubric=POLITE).agent_name
    assert name != Judge(OpenAIAgent("small", **{**make, "temperature": 1.0}), rubric=POLITE).agent_name


def test_copies_of_an_environment_share_its_judges_and_processes_have_none() -> None:
    env = Greeting()
    env.judges = [judge := Judge(ScriptedJudge(lambda _: YES), rubric=POLITE)]
    assert copy.deepcopy(env).judges == copy.copy(env).judges == [judge]
    moved = pickle.loads(pickle.dumps(env))
    with pytest.raises(ConfigError, match="the judges of Greeting are not pickled with it"):
        moved.rollout([{"seed": 0}], ScriptedAgent(["hello"], repeat_last=True))


def test_the_order_of_a_group_is_drawn_by_seed() -> None:
    group = [conversation("A guest.", "hello " * n) for n in range(1, 6)]
    judge = Judge(ScriptedJudge(longest_first), rubric={"best": "Which?"}, scope="group")
    places = [[one.order for one in judge.judge_group(group)] for _ in range(2)]
    assert places[0] == places[1]
    seeds = [Judge(ScriptedJudge(longest_first), rubric={"best": "?"}, scope="group", seed=seed) for seed in range(8)]
    orders = {str([one.order for one in other.judge_group(group)]) for other in seeds}
    assert len(orders) > 4
    assert [one.values["best"] for one in judge.judge_group(group)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [one.calls for one in judge.judge_group(group)] == [0.2] * 5


def test_two_orders_cancel_a_preference_for_the_first_place() -> None:
    def first(prompt: str) -> dict[str, list[int]]:
        return {"best": [1, 2]}

    group = [conversation("A guest.", output) for output in ("hello", "good day")]
    once = Judge(ScriptedJudge(first), rubric={"best": "Which?"}, scope="group").judge_group(group)
    assert sorted(one.values["best"] for one in once) == [0.0, 1.0]
    twice = Judge(ScriptedJudge(first), rubric={"best": "Which?"}, scope="group", num_orders=2).judge_group(group)
    assert [one.values["best"] for one in twice] == [0.5, 0.5]
    assert sorted(one.order for one in twice) == [[1, 2], [2, 1]]


def test_a_single_rollout_is_not_compared() -> None:
    agent = ScriptedJudge(longest_first)
    [only] = Judge(agent, rubric={"best": "Which?"}, scope="group").judge_group([PLAYED])
    assert (only.values, only.calls, agent.batches) == ({"best": 0.5}, 0, [])


def test_the_reference_answer_is_shown_where_there_is_one(caplog: pytest.LogCaptureFixture) -> None:
    agent = ScriptedJudge(lambda _: YES)
    judge = Judge(agent, rubric=POLITE, reference="answer")
    judge.judge_episode(conversation("A guest.", "hello", task_data={"answer": ["hello", "good day"]}))
    judge.judge_episode(PLAYED)
    judge.judge_episode(conversation("A guest.", "hm"))
    assert 'REFERENCE ANSWER\n| ["hello", "good day"]' in agent.prompts[0]
    assert not any("REFERENCE" in prompt for prompt in agent.prompts[1:])
    assert caplog.text.count("has no task_data['answer']") == 1


def test_a_turn_is_judged_by_what_came_before() -> None:
    agent = ScriptedJudge(lambda _: YES)
    played = conversation("A guest.", "hello", "Another.", "go away", "They leave.", "good")
    judgment = Judge(agent, rubric=POLITE, scope="turn").judge_turn(played, 1)
    assert judgment.turn == 1
    before, _, turn = agent.prompts[0].partition("\nTHE TURN\n")
    assert "| hello" in before
    assert turn.startswith("--- the agent, turn 1:\n| go away\nEND OF THE TURN")
    assert "They leave" not in agent.prompts[0]


def test_a_long_episode_is_shortened_in_the_middle_of_its_messages() -> None:
    agent = ScriptedJudge(lambda _: YES)
    Judge(agent, rubric=POLITE, max_characters=1000).judge_episode(conversation("A guest. " * 1000, "x" * 5000))
    assert len(agent.prompts[0]) < 3000
    assert agent.prompts[0].count("characters are omitted") == 2
