"""A thought that the token budget cut is closed before the next observation, by tokens that are not the agent's."""

from typing import Any

import pytest
from chat_families import family

from agentsgym.tokens.calls.reader import read_answer
from agentsgym.tokens.transcript import ChatFormat, Transcript
from agentsgym.types import Action

USER = {"role": "user", "content": "go"}
THINKING = ["qwen3", "qwen3_5_think", "qwen3_6", "qwen3_8", "nemotron_3_nano", "nemotron_3_ultra"]


def played(name: str, text: str, finish_reason: Any) -> tuple[str, tuple[int, int], Transcript]:
    """The text of a record in which an answer is followed by an observation."""
    tokenizer = family(name)
    chat_format = ChatFormat.of(tokenizer)
    transcript = Transcript(chat_format)
    transcript.observe([USER])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    action = read_answer(Action(text=text, token_ids=ids, finish_reason=finish_reason), chat_format)
    span = transcript.act(action)
    transcript.observe([USER])
    return tokenizer.decode(transcript.token_ids), span, transcript


@pytest.mark.parametrize("name", THINKING)
def test_a_cut_thought_is_closed_as_the_template_closes_it(name: str) -> None:
    begins = "<think>\n" if name == "qwen3" else ""
    text, (start, stop), transcript = played(name, f"{begins}Let me see", "length")
    behind = text.partition("Let me see")[2].partition("<|im_end|>")[0]
    assert behind.strip() == "</think>"
    assert family(name).decode(transcript.token_ids[start:stop]).endswith("Let me see")
    assert transcript.messages[1] == {"role": "assistant", "content": "", "reasoning_content": "Let me see"}


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize(
    ("text", "finish_reason"), [("Let me see<|im_end|>", "stop"), ("It is 7</think>\n\n7, not", "length")]
)
def test_other_answers_are_left_as_they_were_sampled(name: str, text: str, finish_reason: Any) -> None:
    begins = "<think>\n" if name == "qwen3" else ""
    text = f"{begins}{text}"
    record, (_, stop), transcript = played(name, text, finish_reason)
    tokenizer = family(name)
    assert tokenizer.decode(transcript.token_ids[:stop]).endswith(text)
    assert tokenizer.decode(transcript.token_ids[stop:]).count("</think>") == record.count("</think>") - record[
        : record.index(text) + len(text)
    ].count("</think>")
    assert not tokenizer.decode(transcript.token_ids[stop:]).startswith("\n</think>")
