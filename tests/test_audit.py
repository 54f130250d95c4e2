import copy
import dataclasses
import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentsgym.agents.base import Agent
from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.agents.scripted import RandomAgent, ScriptedAgent
from agentsgym.batch.views import transitions
from agentsgym.credit.rewards import per_token_rewards
from agentsgym.envs.TwentyQuestions import TwentyQuestionsEnv
from agentsgym.errors import ConfigError
from agentsgym.record_audit import AuditReport, audit
from agentsgym.testing import chat_tokenizer
from agentsgym.tiny import tiny_policy
from agentsgym.types import Message, StopReason, Trajectory, Turn

TOKENIZER = chat_tokenizer("chatml")
TASKS = [{"solution": name, "seed": 0} for name in ("dog", "piano")]
SAYINGS = ["Is it an animal?", "Is it a piano?", "Is it a dog?", "hello"]
GAME: dict[str, Any] = {"max_steps_per_episode": 5, "error_allowance": 9, "reward_scheme": "win_plus_information"}


def drawn(picture: str) -> Trajectory:
    """A good trajectory, '.' for an environment token and one letter an action; '|' opens a segment."""
    tokens = picture.replace("|", "")
    begins = [index - n for n, index in enumerate(i for i, sign in enumerate(picture) if sign == "|")]
    messages: list[Message] = []
    turns: list[Turn] = []
    for k, letter in enumerate(sorted({*tokens} - {"."})):
        messages += [{"role": "user", "content": f"q{k}"}, {"role": "assistant", "content": letter}]
        start, stop = tokens.index(letter), tokens.rindex(letter) + 1
        turns.append(
            Turn(
                start=start,
                stop=stop,
                reward=k + 1.0,
                message_index=len(messages) - 1,
                prompt_start=max([0, *(begin for begin in begins if begin <= start)]),
            )
        )
    trajectory = Trajectory(
        token_ids=list(range(len(tokens))),
        turns=turns,
        messages=messages,
        final_reward=sum(turn.reward for turn in turns),
        stop_reason=StopReason.DONE,
        logprobs=[0.0 if token == "." else -1.0 for token in tokens],
        session_id="s",
    )
    return dataclasses.replace(trajectory, per_token_rewards=per_token_rewards(trajectory))


PICTURES = ["..AA.BBB..C.", ".A", "..AAA|..BB.C|...DD", "..A|..B|..C"]


def put(value: Any, **changes: Any) -> Any:
    """A copy with other values, past the checks of its constructor."""
    changed = copy.copy(value)
    for name, other in changes.items():
        object.__setattr__(changed, name, other)
    return changed


def with_turn(trajectory: Trajectory, k: int, **changes: Any) -> Any:
    turns = list(trajectory.turns)
    return put(trajectory, turns=[*turns[:k], put(turns[k], **changes), *turns[k + 1 :]])


def at(values: Any, index: int, value: Any) -> list[Any]:
    return [*values[:index], value, *values[index + 1 :]]


def named(report: AuditReport) -> list[tuple[str, int | None]]:
    return [(problem.check, problem.turn) for problem in report.problems]


class Breaking(Agent):
    """Requests once, then raises."""

    def get_action(self, messages: list[Message], agent_state: Any) -> tuple[str, Any]:
        if agent_state:
            raise OSError("the line is dead")
        return "Is it an animal?", 1


@cache
def small_policy() -> tuple[Any, Any]:
    return tiny_policy(TwentyQuestionsEnv(), hidden_size=16, num_heads=2)


def sampled_rollouts(**config: Any) -> list[Trajectory]:
    model, tokenizer = small_policy()
    env = TwentyQuestionsEnv(tokenizer, {**GAME, **config})
    return env.rollout(TASKS, PolicyAgent(model, tokenizer, max_turn_tokens=6), 2)


def text_rollouts(tokenizer: Any = TOKENIZER, agent: Agent | None = None, **config: Any) -> list[Trajectory]:
    env = TwentyQuestionsEnv(tokenizer, {**GAME, **config})
    return env.rollout(TASKS, agent or RandomAgent(SAYINGS), 3)


@pytest.mark.parametrize("picture", PICTURES)
def test_a_good_trajectory_has_no_problem(picture: str) -> None:
    report = audit([drawn(picture)], vocabulary_size=100)
    assert report.problems == ()
    assert report.num_segments == len(drawn(picture).segments) == picture.count("|") + 1


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"error_allowance": 0},
        {"max_trajectory_tokens": 160},
        {"episodes_per_trial": 3, "free_shots": 1},
        {"episodes_per_trial": 3, "free_shots": 2, "keep_history": True},
        {"history": lambda messages: messages[-1:]},
        {"history": "rerender"},
    ],
    ids=lambda config: str({key: getattr(value, "__name__", value) for key, value in config.items()}),
)
@pytest.mark.parametrize("kind", ["chatml", "none", None])
def test_what_text_agents_play_has_no_problem(kind: Any, config: dict[str, Any]) -> None:
    tokenizer = None if kind is None else chat_tokenizer(kind)
    trajectories = text_rollouts(tokenizer, **config)
    report = audit(trajectories, vocabulary_size=None if tokenizer is None else len(tokenizer))
    assert report.problems == ()
    assert report.num_turns == report.num_inexact_turns == sum(len(row.turns) for row in trajectories)
    assert report.num_turns_without_logprobs == (0 if tokenizer is None else report.num_turns)
    assert report.num_agent_tokens == sum(sum(row.agent_token_mask) for row in trajectories)
    assert report.num_segments == sum(len(row.segments) for row in trajectories)


@pytest.mark.parametrize("config", [{}, {"episodes_per_trial": 2, "keep_history": True}], ids=str)
def test_what_a_model_samples_has_no_problem(config: dict[str, Any]) -> None:
    report = audit(sampled_rollouts(**config), vocabulary_size=len(small_policy()[1]))
    assert report.problems == ()
    assert report.num_agent_tokens > report.num_turns > 0
    assert report.num_inexact_turns == report.num_turns_without_logprobs == 0


@pytest.mark.parametrize("agent", [Breaking(), ScriptedAgent(["Is it an animal?", "hello"])])
def test_a_failed_rollout_has_no_problem_and_is_counted(agent: Agent) -> None:
    trajectories = text_rollouts(agent=agent)
    report = audit(trajectories)
    assert report.problems == ()
    assert report.num_failed == len(trajectories) == report.num_trajectories


@pytest.mark.parametrize("token_credit", ["spread", "last", "each"])
@pytest.mark.parametrize("turn_credit", ["step", "final", "repeat_final", "spread_final"])
def test_rewards_are_where_the_credit_of_the_game_puts_them(turn_credit: str, token_credit: str) -> None:
    if turn_credit == "spread_final" and token_credit != "spread":
        with pytest.raises(ConfigError, match="spread_final"):
            audit([], turn_credit=turn_credit, token_credit=token_credit)
        return
    trajectories = text_rollouts(turn_credit=turn_credit, token_credit=token_credit)
    assert audit(trajectories, turn_credit=turn_credit, token_credit=token_credit).ok
    others = {("step", "spread"), ("final", "last"), ("repeat_final", "each")} - {(turn_credit, token_credit)}
    for other_turn, other_token in others:
        report = audit(trajectories, turn_credit=other_turn, token_credit=other_token)
        assert {problem.check for problem in report.problems} == {"rewards"}
    assert audit(trajectories, turn_credit=None).ok
    assert audit(trajectories, token_credit=None).ok


def test_the_reward_check_is_the_sum_of_the_rewards() -> None:
    for trajectory in text_rollouts():
        earned = [turn.reward for turn in trajectory.turns if turn.stop > turn.start]
        assert math.fsum(trajectory.per_token_rewards) == pytest.approx(math.fsum(earned))
        doubled = put(trajectory, per_token_rewards=[2 * reward for reward in trajectory.per_token_rewards])
        assert named(audit([doubled])) == [("rewards", k) for k, turn in enumerate(trajectory.turns) if turn.reward]


def test_a_final_reward_of_the_games_own_is_allowed_on_request() -> None:
    class Own(TwentyQuestionsEnv):
        def _final_reward(self, state: dict[str, Any], turn_rewards: list[float]) -> float:
            return 7.0

    trajectories = Own(TOKENIZER, GAME).rollout(TASKS, RandomAgent(SAYINGS))
    assert named(audit(trajectories)) == [("outcome", None)] * len(TASKS)
    assert audit(trajectories, final_reward_is_sum=False).ok


GOOD = drawn("..AA.BBB..C.")
FAILED = put(GOOD, stop_reason=StopReason.FAILED, final_reward=0.0, error="Traceback", per_token_rewards=[0.0] * 12)


BROKEN = [
    # token ids
    (put(GOOD, token_ids=at(GOOD.token_ids, 3, -1)), "token_ids", None, "in [0, 100), got -1 at token 3"),
    (put(GOOD, token_ids=at(GOOD.token_ids, 3, 100)), "token_ids", None, "got 100 at token 3"),
    (put(GOOD, token_ids=at(GOOD.token_ids, 3, 2.0)), "token_ids", None, "got 2.0 at token 3"),
    (put(GOOD, token_ids=at(GOOD.token_ids, 3, True)), "token_ids", None, "got True at token 3"),
    (put(GOOD, token_ids=at(at(GOOD.token_ids, 3, -1), 5, -1)), "token_ids", None, "at token 3 and 1 more such"),
    # lists of the wrong length
    (put(GOOD, logprobs=GOOD.logprobs[:-1]), "lengths", None, "logprobs must have 12 values, one per token, got 11"),
    (put(GOOD, logprobs=[]), "lengths", None, "logprobs must have 12 values, one per token, got 0"),
    (put(GOOD, per_token_rewards=[]), "lengths", None, "per_token_rewards must have 12 values"),
    # spans
    (with_turn(GOOD, 1, start=3), "spans", 1, "its span must lie in [4, 12), got [3, 8)"),
    (with_turn(GOOD, 2, stop=13), "spans", 2, "its span must lie in [8, 12), got [10, 13)"),
    (with_turn(GOOD, 1, stop=4), "spans", 1, "got [5, 4)"),
    (with_turn(with_turn(GOOD, 1, start=10, stop=11), 2, start=5, stop=8), "spans", 2, "in [11, 12), got [5, 8)"),
    # parents
    (with_turn(GOOD, 1, parent=1), "parents", 1, "its parent must be an earlier turn, got 1"),
    (with_turn(GOOD, 1, parent=True), "fields", 1, "parent must be an int >= 0 or None, got True (bool)"),
    # prompts
    (with_turn(GOOD, 1, prompt_start=2), "prompts", 1, "at 0, like the previous turn's, or in [4, 5], got 2"),
    (with_turn(GOOD, 1, prompt_start=6), "prompts", 1, "got 6"),
    (with_turn(GOOD, 2, prompt_start=10), "prompts", 2, "its prompt must have at least one token, got an empty one"),
    (drawn("A.B"), "prompts", 0, "its prompt must have at least one token, got an empty one"),
    # messages
    (put(GOOD, messages=at(GOOD.messages, 2, "q")), "messages", None, "messages[2] must have a str 'role'"),
    (put(GOOD, messages=at(GOOD.messages, 2, {"role": "user"})), "messages", None, "messages[2] must have"),
    (put(GOOD, messages=at(GOOD.messages, 2, {"role": 1, "content": ""})), "messages", None, "messages[2] must have"),
    (put(GOOD, messages=at(GOOD.messages, 3, GOOD.messages[2])), "messages", 1, "assistant message in (1, 6), got 3"),
    (with_turn(GOOD, 2, message_index=6), "messages", 2, "in (3, 6), got 6"),
    (with_turn(GOOD, 1, message_index=1), "messages", 1, "in (1, 6), got 1"),
    (with_turn(GOOD, 1, prompt_messages=[]), "messages", 1, "prompt_messages must be messages that end with"),
    (with_turn(GOOD, 1, prompt_messages=GOOD.messages[:2]), "messages", 1, "prompt_messages must be messages"),
    (with_turn(GOOD, 1, prompt_messages=["q", GOOD.messages[0]]), "messages", 1, "prompt_messages must be messages"),
    (with_turn(GOOD, 1, episode=1), "messages", 2, "its episode must be 1 or later, got 0"),
    # log-probabilities
    (put(GOOD, logprobs=at(GOOD.logprobs, 6, 0.5)), "logprobs", 1, "must be finite and at most 0, got 0.5 at token 6"),
    (put(GOOD, logprobs=at(GOOD.logprobs, 6, -math.inf)), "logprobs", 1, "got -inf at token 6"),
    (put(GOOD, logprobs=at(GOOD.logprobs, 6, -math.inf)), "logprobs", 1, "got -inf at token 6"),
    (put(GOOD, logprobs=at(GOOD.logprobs, 4, -1.0)), "logprobs", None, "on environment tokens, got -1.0 at token 4"),
    # rewards
    (put(GOOD, per_token_rewards=at(GOOD.per_token_rewards, 4, 0.5)), "rewards", None, "got 0.5 at token 4"),
    (put(GOOD, per_token_rewards=at(GOOD.per_token_rewards, 11, math.nan)), "rewards", None, "got nan at token 11"),
    (put(GOOD, per_token_rewards=at(GOOD.per_token_rewards, 2, 0.6)), "rewards", 0, "must be [0.5, 0.5] (turn_cr"),
    (put(GOOD, per_token_rewards=at(GOOD.per_token_rewards, 2, math.inf)), "rewards", 0, "finite, got [1.0, inf"),
    (with_turn(GOOD, 0, reward=math.nan), "rewards", 0, "rewards must be finite, got [nan, 0.5"),
    (put(FAILED, per_token_rewards=at([0.0] * 12, 2, 1.0)), "rewards", None, "a failed rollout, got 1.0 at token 2"),
    # how it ended
    (put(GOOD, final_reward=5.0), "outcome", None, "must be the sum of the turn rewards, 6.0, got 5.0"),
    (put(GOOD, final_reward=math.inf), "outcome", None, "final_reward must be finite, got inf"),
    (put(FAILED, final_reward=1.0), "outcome", None, "final_reward of a failed rollout must be 0.0, got 1.0"),
    (put(FAILED, error=None), "outcome", None, "if and only if its stop reason is 'failed', got 'failed' and None"),
    (put(GOOD, error="Traceback"), "outcome", None, "stop reason is 'failed', got 'done' and 'Traceback'"),
    (put(GOOD, stop_reason=StopReason.INVALID), "outcome", None, "the last turn must be invalid"),
    (drawn(""), "outcome", None, "without turns must end with 'max_tokens' or 'failed', got 'done'"),
    # values that are no such values
    (put(GOOD, token_ids="abcdefghijkl"), "fields", None, "token_ids must be a list, got 'abcdefghijkl' (str)"),
    (put(GOOD, turns=None), "fields", None, "turns must be a list, got None (NoneType)"),
    (put(GOOD, stop_reason="done"), "fields", None, "stop_reason must be a StopReason, got 'done' (str)"),
    (put(GOOD, logprobs=at(GOOD.logprobs, 3, None)), "fields", None, "logprobs must be a list of numbers or None"),
    (put(GOOD, per_token_rewards=at(GOOD.per_token_rewards, 0, "0")), "fields", None, "per_token_rewards must be"),
    (put(GOOD, final_reward=None), "fields", None, "final_reward must be a number, got None"),
    (put(GOOD, final_reward=True), "fields", None, "final_reward must be a number, got True (bool)"),
    (put(GOOD, session_id=7), "fields", None, "session_id must be a str, got 7"),
    (put(GOOD, error=OSError()), "fields", None, "error must be a str or None, got OSError()"),
    (put(GOOD, info=None), "fields", None, "info must be a dict, got None"),
    (put(GOOD, task_index=-1), "fields", None, "task_index must be an int >= 0, got -1"),
    (with_turn(GOOD, 1, start=5.0), "fields", 1, "start must be an int >= 0, got 5.0 (float)"),
    (with_turn(GOOD, 1, reward="1"), "fields", 1, "reward must be a number, got '1' (str)"),
    (with_turn(GOOD, 1, exact=1), "fields", 1, "exact must be True or False, got 1 (int)"),
]  # fmt: skip


@pytest.mark.parametrize(("trajectory", "check", "turn", "words"), BROKEN, ids=range(len(BROKEN)))
def test_what_is_broken_is_named(trajectory: Any, check: str, turn: int | None, words: str) -> None:
    report = audit([GOOD, trajectory, GOOD], vocabulary_size=100)
    assert not report.ok
    [problem] = report.problems
    assert (problem.check, problem.turn, problem.trajectory) == (check, turn, 1)
    assert words in problem.message


def test_an_empty_rollout_may_lack_room_or_break() -> None:
    empty = drawn("")
    assert audit(
        [put(empty, stop_reason=StopReason.MAX_TOKENS, token_ids=[1], logprobs=[0.0], per_token_rewards=[0])]
    ).ok
    assert audit([FAILED, put(empty, stop_reason=StopReason.FAILED, error="Traceback")]).ok


def test_a_log_probability_of_an_agent_token_may_be_unknown() -> None:
    assert audit([put(GOOD, logprobs=at(GOOD.logprobs, 6, math.nan))]).ok
    assert named(audit([put(GOOD, logprobs=at(GOOD.logprobs, 0, math.nan))])) == [("logprobs", None)]


@given(st.sampled_from(PICTURES), st.data())
def test_a_wrong_value_is_found_at_its_token_and_in_its_turn(picture: str, data: st.DataObject) -> None:
    good = drawn(picture)
    index = data.draw(st.integers(0, len(good.token_ids) - 1))
    name = data.draw(st.sampled_from(["logprobs", "per_token_rewards"]))
    value = data.draw(st.sampled_from([-math.inf, math.inf, 17.5]))
    owners = [k for k, turn in enumerate(good.turns) if turn.start <= index < turn.stop]
    report = audit([put(good, **{name: at(getattr(good, name), index, value)})])
    assert named(report) == [(name.removeprefix("per_token_"), owners[0] if owners else None)]
    assert owners or f"at token {index}" in report.problems[0].message


@st.composite
def placed_turns(draw: st.DrawFn) -> Any:
    """Turns with good spans and any places at which their prompts are answered to begin; each id stands once."""
    edges = sorted(draw(st.lists(st.integers(1, 12), min_size=2, max_size=8)))
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    starts = draw(st.lists(st.integers(0, 12), min_size=len(spans), max_size=len(spans)))
    good = drawn("." + "".join(chr(65 + k) for k in range(len(spans))))
    turns = [
        put(turn, start=start, stop=stop, prompt_start=begin)
        for turn, (start, stop), begin in zip(good.turns, spans, starts, strict=True)
    ]
    whole = put(good, token_ids=list(range(12)), turns=turns, logprobs=None)
    return put(whole, per_token_rewards=per_token_rewards(whole))


@given(placed_turns())
def test_prompts_pass_just_where_each_extends_what_stood_before_it_or_shares_nothing_with_it(trajectory: Any) -> None:
    nested = transitions([trajectory])
    prompts, answers = nested["prompt_ids"][0], nested["ids"][0]
    assume(all(prompts))  # an empty prompt shows no id by which its place could be recognized
    contexts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    extends = all(
        prompt[: len(before)] == before or not {*prompt} & {*before}
        for before, prompt in zip(contexts, prompts[1:], strict=False)
    )
    assert ("prompts" in {check for check, _ in named(audit([trajectory]))}) == (not extends)


def duck(trajectory: Trajectory, **changes: Any) -> Any:
    values = {field.name: getattr(trajectory, field.name) for field in dataclasses.fields(trajectory)}
    turns = [
        SimpleNamespace(**{field.name: getattr(turn, field.name) for field in dataclasses.fields(turn)})
        for turn in trajectory.turns
    ]
    return SimpleNamespace(**{**values, "turns": turns, "agent_token_mask": trajectory.agent_token_mask, **changes})


def test_another_class_is_audited_alike() -> None:
    assert audit([duck(drawn(picture)) for picture in PICTURES]).ok
    report = audit([duck(GOOD, agent_token_mask=at(GOOD.agent_token_mask, 4, 1))])
    assert named(report) == [("mask", None)]
    assert "must be 1 only in the turns' spans, got 1 at token 4" in report.problems[0].message
    assert named(audit([duck(GOOD, agent_token_mask=[1])])) == [("lengths", None)]
    missing = duck(GOOD)
    del missing.agent_token_mask
    assert named(audit([missing])) == [("lengths", None)]


def test_something_else_altogether_is_named_field_by_field() -> None:
    rubbish: Any = [None]
    report = audit(rubbish)
    assert {problem.check for problem in report.problems} == {"fields"}
    assert report.num_trajectories == 1
    assert report.num_turns == 0
    assert "token_ids must be a list, but NoneType has no such attribute" in str(report)
    report = audit([put(GOOD, turns=[*GOOD.turns[:2], {"start": 10}])])
    assert {*named(report)} == {("fields", 2)}
    assert report.problems[0].message == "start must be an int >= 0, but dict has no such attribute"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"vocabulary_size": 0}, "vocabulary_size must be a positive int or None, got 0"),
        ({"vocabulary_size": True}, "vocabulary_size must be a positive int or None, got True"),
        ({"turn_credit": "stepp"}, "turn_credit cannot be 'stepp'; did you mean 'step'"),
        ({"token_credit": "first"}, "token_credit cannot be 'first'"),
    ],
)
def test_an_argument_that_means_nothing_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        audit([GOOD], **arguments)
