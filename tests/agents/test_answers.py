"""Sampled ids as the action of a turn."""

from typing import Any

from agentsgym.agents.answers import action_from_ids, sampled_action
from agentsgym.testing import chat_tokenizer
from agentsgym.types import Action, TurnRequest

TOKENIZER: Any = chat_tokenizer("llama3")
END: int = TOKENIZER.convert_tokens_to_ids("<|eot_id|>")
HELLO: list[int] = TOKENIZER("hello", add_special_tokens=False)["input_ids"]


def request(*token_ids: int) -> TurnRequest:
    return TurnRequest(session_id="a", messages=[], token_ids=token_ids, agent_state="kept")


def test_the_id_that_ends_an_answer_is_kept_and_is_no_text() -> None:
    ids = [*HELLO, END]
    action = action_from_ids(request(1), ids, TOKENIZER, frozenset({END}), logprobs=[-0.5] * len(ids))
    assert action == Action(
        text="hello", token_ids=ids, logprobs=[-0.5] * len(ids), agent_state="kept", finish_reason="stop"
    )


def test_an_answer_that_ends_with_another_id_was_cut() -> None:
    action = action_from_ids(request(1), HELLO, TOKENIZER, frozenset({END}))
    assert action == Action(text="hello", token_ids=HELLO, agent_state="kept", finish_reason="length")
    empty = action_from_ids(request(1), [], TOKENIZER, frozenset({END}))
    assert empty == Action(text="", token_ids=[], agent_state="kept", finish_reason="length")


def test_a_stop_string_ends_the_text_and_the_ids_are_kept() -> None:
    action = action_from_ids(
        request(1), HELLO, TOKENIZER, frozenset({END}), text_before_stop=lambda text: text.partition("llo")[0]
    )
    assert action == Action(text="he", token_ids=HELLO, agent_state="kept", finish_reason="stop")


def test_ids_after_a_rendered_prompt_count_as_text() -> None:
    action = sampled_action(request(), HELLO, text="hello", finish_reason="stop", logprobs=[-1.0] * len(HELLO))
    assert action == Action(text="hello", agent_state="kept", finish_reason="stop")
