"""What an environment records where history is rewritten on purpose."""

import dataclasses
from typing import Any

import pytest
from guess_game import Counting, GuessEnv, bare, tasks
from hypothesis import given
from hypothesis import strategies as st

from agentsgym import Action, Agent, ConfigError, Message, StopReason, Trajectory, TurnRequest
from agentsgym.batch.views import transitions
from agentsgym.testing import chat_tokenizer

TOKENIZER = chat_tokenizer("chatml")
END: Any = TOKENIZER.eos_token_id
# No earlier answer keeps its thoughts.
FORGETS = (
    "{%- for message in messages -%}"
    "<|im_start|>{{ message.role }}\n"
    "{%- if message.role == 'assistant' and '</think>' in message.content -%}"
    "{{ message.content.split('</think>')[-1] }}"
    "{%- else -%}{{ message.content }}{%- endif -%}<|im_end|>\n"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def forgetful_tokenizer() -> Any:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = FORGETS
    return tokenizer


class Thinking(Agent):
    """Thinks aloud one character a token, counts, and notes every prompt that it was given."""

    def __init__(self, tokenizer: Any = TOKENIZER, thought: str = "<think>so</think>") -> None:
        self.tokenizer, self.thought = tokenizer, thought
        self.prompts: dict[str, list[list[int]]] = {}
        self.seen: dict[str, list[list[Message]]] = {}
        self.output: dict[str, list[list[int]]] = {}

    def act(self, requests: Any) -> list[Action]:
        return [self.answer(request) for request in requests]

    def answer(self, request: TurnRequest) -> Action:
        number = (request.agent_state or 0) + 1
        text = f"{self.thought}{number}" if self.thought else str(number)
        ids = [i for letter in text for i in self.tokenizer(letter, add_special_tokens=False)["input_ids"]] + [END]
        ids, finish_reason = (
            ids[: request.max_new_tokens],
            "stop" if len(ids) <= (request.max_new_tokens or 99) else "length",
        )
        key = request.session_id
        self.prompts.setdefault(key, []).append(list(request.token_ids))
        self.seen.setdefault(key, []).append([*request.messages])
        self.output.setdefault(key, []).append(ids)
        return Action(
            text=text, token_ids=ids, logprobs=[-1.0] * len(ids), agent_state=number, finish_reason=finish_reason
        )


class ThinkingGuessEnv(GuessEnv):
    def _step_episode(self, session_id: str, state: dict[str, Any], action: str) -> Any:
        return super()._step_episode(session_id, state, action.rpartition("</think>")[2])


def play(agent: Agent, solution: int = 6, tokenizer: Any = TOKENIZER, **config: Any) -> Trajectory:
    [trajectory] = ThinkingGuessEnv(tokenizer, {"max_steps_per_episode": 8, **config}).rollout(tasks(solution), agent)
    return trajectory


def last(count: int) -> Any:
    """A window: system message and the newest messages."""

    def window(messages: list[Message]) -> list[Message]:
        return [message for message in messages[:-count] if message["role"] == "system"] + messages[-count:]

    return window


def check_record(trajectory: Trajectory, agent: Thinking) -> None:
    """The trajectory holds the prompts and the answers of every turn, to the token."""
    nested = transitions([trajectory])
    assert nested["prompt_ids"][0] == agent.prompts[trajectory.session_id]
    assert nested["ids"][0] == agent.output[trajectory.session_id]
    assert [messages[:-1] for messages in nested["messages"][0]] == agent.seen[trajectory.session_id]
    assert sum(trajectory.agent_token_mask) == sum(map(len, nested["ids"][0]))
    lengths = {len(trajectory.token_ids), len(trajectory.per_token_rewards), len(trajectory.logprobs or ())}
    assert lengths == {sum(map(len, trajectory.segments))}
    assert sum(trajectory.per_token_rewards) == pytest.approx(sum(trajectory.turn_rewards))


def test_each_turn_is_sampled_from_what_the_template_makes_of_the_conversation_now() -> None:
    tokenizer = forgetful_tokenizer()
    agent = Thinking(tokenizer)
    trajectory = play(agent, tokenizer=tokenizer, history="rerender", system_prompt="Think.")
    check_record(trajectory, agent)
    assert len(trajectory.turns) == len(trajectory.segments) == 6
    for turn, prompt in zip(trajectory.turns, transitions([trajectory])["prompt_ids"][0], strict=True):
        messages: Any = list(trajectory.messages[: turn.message_index])
        assert prompt == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert "<think>" not in tokenizer.decode(prompt)


def test_where_the_template_changes_nothing_rerendering_goes_on_in_one_segment() -> None:
    appended, rendered = (play(Counting(), history=history) for history in ("append", "rerender"))
    assert len(rendered.segments) == 1
    assert bare(rendered) == bare(appended)


def test_sampled_ids_that_are_not_how_text_is_encoded_stay_in_their_own_turn() -> None:
    agent = Thinking(thought="aaaa")
    trajectory = play(agent, history="rerender", error_allowance=9)
    check_record(trajectory, agent)
    canonical = TOKENIZER("aaaa1", add_special_tokens=False)["input_ids"]
    assert (agent.output[trajectory.session_id][0] == [*canonical, END]) == (len(trajectory.segments) == 1)


def test_a_history_that_changes_nothing_records_what_appending_records() -> None:
    appended, through = (play(Thinking(), history=history) for history in ("append", lambda messages: messages))
    assert len(through.segments) == 1
    without = [dataclasses.replace(turn, prompt_messages=None) for turn in through.turns]
    assert bare(dataclasses.replace(through, turns=without)) == bare(appended)


@given(count=st.integers(1, 12), solution=st.integers(1, 8), system=st.sampled_from(["", "Think."]))
def test_a_window_is_what_the_agent_sees_and_what_is_recorded(count: int, solution: int, system: str) -> None:
    agent = Thinking()
    trajectory = play(agent, solution, history=last(count), system_prompt=system)
    check_record(trajectory, agent)
    for k, seen in enumerate(agent.seen[trajectory.session_id]):
        whole: Any = list(trajectory.messages[: trajectory.turns[k].message_index])
        assert seen == (whole if len(whole) <= count else last(count)(whole))
    assert [message["role"] for message in trajectory.messages if message["role"] == "assistant"] == [
        "assistant"
    ] * solution


def test_after_a_summary_sampled_tokens_are_appended_again() -> None:
    def summary(messages: list[Message]) -> list[Message]:
        if len(messages) < 6:
            return messages
        return [{"role": "user", "content": f"{len(messages)} messages ago. {messages[-1]['content']}"}]

    agent = Thinking()
    trajectory = play(agent, 8, history=summary)
    check_record(trajectory, agent)
    for segment in trajectory.segments:
        turns = [turn for turn in trajectory.turns if turn.prompt_start == segment.start]
        assert turns
        assert turns[-1].stop == segment.stop
    assert 1 < len(trajectory.segments) < len(trajectory.turns)
    assert "7 messages ago" in agent.seen[trajectory.session_id][-1][0]["content"]


def test_a_window_makes_room_for_more_turns() -> None:
    whole = play(Thinking(), 8, max_trajectory_tokens=150)
    window = play(Thinking(), 8, max_trajectory_tokens=150, history=last(1))
    assert whole.stop_reason is StopReason.MAX_TOKENS
    assert window.stop_reason is StopReason.DONE
    assert max(map(len, window.segments)) <= 150


def loud(messages: list[Message]) -> list[Message]:
    return [{**message, "content": message["content"].upper()} for message in messages]


@pytest.mark.parametrize("history", ["rerender", loud])
def test_a_record_that_has_no_room_left_ends_with_the_last_action(history: Any) -> None:
    tokenizer = forgetful_tokenizer()
    agent = Thinking(tokenizer)
    trajectory = play(agent, 8, tokenizer=tokenizer, history=history, max_trajectory_tokens=75)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.turns
    check_record(trajectory, agent)
    assert trajectory.turns[-1].stop == len(trajectory.token_ids)
    assert trajectory.messages[-1]["role"] == "assistant"


def test_a_history_cannot_change_what_was_answered() -> None:
    def vandal(messages: list[Message]) -> list[Message]:
        for message in messages:
            message["content"] = "?"
        return messages

    agent = Counting()
    trajectory = play(agent, 3, history=vandal)
    assert [message["content"] for message in trajectory.messages if message["role"] == "assistant"] == ["1", "2", "3"]
    assert trajectory.messages[0]["content"] == "Guess a number from 1 to 9."


def test_a_history_may_keep_the_messages_that_it_gave_and_change_them() -> None:
    notes: Message = {"role": "user", "content": "Turns:"}

    def count(messages: list[Message]) -> list[Message]:
        notes["content"] += " I"
        return [notes, *(messages if len(messages) == 1 else messages[1:])]

    agent = Thinking()
    trajectory = play(agent, 4, history=count)
    check_record(trajectory, agent)
    nested = transitions([trajectory])
    for k, (prompt, messages) in enumerate(zip(nested["prompt_ids"][0], nested["messages"][0], strict=True), start=1):
        assert messages[0]["content"] == "Turns:" + k * " I"
        assert TOKENIZER.decode(prompt).count(messages[0]["content"] + "<|im_end|>") == 1
    assert len(trajectory.segments) == len(trajectory.turns) == 4


class Quitting(Thinking):
    """Breaks in its third turn."""

    def answer(self, request: TurnRequest) -> Action:
        return super().answer(request) if (request.agent_state or 0) < 2 else 1 / 0  # type: ignore[return-value]


def test_a_rewritten_prompt_that_got_no_answer_is_in_no_segment() -> None:
    agent = Quitting()
    trajectory = play(agent, 5, history=last(1))
    assert trajectory.failed
    assert transitions([trajectory])["prompt_ids"][0] == agent.prompts[trajectory.session_id]
    assert len(trajectory.logprobs or ()) == len(trajectory.per_token_rewards) == len(trajectory.token_ids)
    assert [segment.stop for segment in trajectory.segments] == [turn.stop for turn in trajectory.turns]
    assert trajectory.messages[-1]["role"] == "user"
    appended = play(Quitting(), 5)
    assert appended.turns[-1].stop < len(appended.token_ids)  # nothing was rewritten: the prompt goes on


@pytest.mark.parametrize(
    ("history", "message"),
    [
        (lambda messages: 1 / 0, "ZeroDivisionError"),
        (lambda messages: [], "must return a list of messages"),
        (lambda messages: None, "must return a list of messages"),
        (lambda messages: [{"role": "assistant", "content": "me"}], "ends with the one to answer"),
        (lambda messages: [{"role": "user", "content": "\ud800"}], "valid Unicode"),
    ],
)
def test_a_history_that_breaks_fails_its_own_episode(history: Any, message: str) -> None:
    def later(messages: list[Message]) -> list[Message]:
        return messages if len(messages) < 3 else history(messages)

    env = GuessEnv(TOKENIZER, {"history": later})
    broken, won = env.rollout(tasks(5, 1), Counting())
    assert (broken.stop_reason, won.stop_reason) == (StopReason.FAILED, StopReason.DONE)
    assert message in (broken.error or "")
    assert len(broken.turns) == 1


def test_text_agents_see_the_rewritten_conversation_too() -> None:
    agent = Thinking()
    env = ThinkingGuessEnv(None, {"history": last(1), "max_steps_per_episode": 3})
    env.rollout(tasks(9), agent)
    assert [len(seen) for seen in next(iter(agent.seen.values()))] == [1, 1, 1]


def test_episodes_that_share_a_conversation_share_its_rewriting() -> None:
    agent = Thinking()
    trajectory = play(agent, 2, history=last(3), keep_history=True, episodes_per_trial=3)
    check_record(trajectory, agent)
    assert max(map(len, agent.seen[trajectory.session_id])) == 3


@pytest.mark.parametrize("history", ["rerender", last(2)])
def test_one_row_of_tokens_is_refused_where_there_are_several(history: Any) -> None:
    env = GuessEnv(TOKENIZER, {"history": history})
    with pytest.raises(ConfigError, match=r"run_trial returns one row .* use generate"):
        env.run_trial(tasks(1), Counting())
    with pytest.raises(ConfigError, match=r"_run_complete_episode returns one row"):
        env._run_complete_episode("s", Counting())
    assert GuessEnv(None, {"history": history}).run_trial(tasks(1), Counting())["final_rewards"] == [1.0]
    assert len(env.generate(tasks(2), Counting(), return_all_steps=True)["ids"][0]) == 2
