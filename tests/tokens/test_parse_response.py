"""transformers' own parser, with the response templates of TRL, reads well-formed answers as we do."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from chat_families import TRL_TEMPLATES, tokenizer_for
from test_round_trips import TOOLS, chat_format_of, draw, written
from trl.chat_template_utils import add_response_schema

from agentsgym import Action
from agentsgym.tokens.calls.reader import read_answer, reader_of


@cache
def oracle_of(name: str) -> Any:
    """A tokenizer with TRL's response template; None if TRL has none for this template."""
    tokenizer = tokenizer_for(TRL_TEMPLATES[name])
    try:
        add_response_schema(tokenizer)
    except ValueError:
        return None
    return tokenizer if getattr(tokenizer, "response_template", None) else None


KNOWN = [name for name in TRL_TEMPLATES if oracle_of(name) is not None]


def test_trl_describes_the_answers_of_most_families() -> None:
    assert len(KNOWN) >= 20


def parsed_by_both(name: str, given: Action) -> Action:
    """The answer without what the other parser misreads."""
    calls = given.tool_calls
    if name.startswith("lfm2"):  # quotes, parentheses and escapes in strings
        calls = [replace(one, arguments={**one.arguments, "text": "Paris"}) for one in calls]
    text = "" if calls and name.startswith("glm") else given.text  # text beside calls
    thought = None if "nothink" in name else given.reasoning  # a thought where the prompt has closed one
    return replace(given, text=text, written=text, reasoning=thought, tool_calls=calls)


@pytest.mark.parametrize("name", KNOWN)
def test_both_agree_on_well_formed_answers(name: str) -> None:
    rng, tokenizer, chat_format = random.Random(f"oracle {name}"), oracle_of(name), chat_format_of(name)
    for _ in range(30):
        given = parsed_by_both(name, draw(rng, name, with_marks=False))
        ids, _ = written(name, given)
        ours = read_answer(Action(text=chat_format.truncated_text(ids), token_ids=ids), chat_format, TOOLS)
        ids = ids[:-1] if name.startswith("glm") else ids  # whose end it takes for text
        text = tokenizer.decode(ids, skip_special_tokens=False)
        theirs = tokenizer.parse_response(text, prefix=reader_of(chat_format)._prompt, tools=TOOLS)
        calls = [one["function"] for one in theirs.get("tool_calls") or ()]
        assert [(one.name, one.arguments) for one in ours.tool_calls] == [
            (one["name"], one["arguments"]) for one in calls
        ], text
        assert (ours.reasoning or "") == (theirs.get("reasoning_content") or theirs.get("thinking") or "").strip(), text
        assert ours.text == (theirs.get("content") or "").strip(), text
