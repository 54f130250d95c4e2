"""Words that a tokenizer cannot read are named: where episodes are played, checked and imitated."""

import logging
from typing import Any

import pytest
from guess_game import Counting, GuessEnv, tasks
from test_transcript_formats import LetterTokenizer

from agentsgym import ConfigError, PolicyAgent, ScriptedAgent, check_env, evaluate, imitate, tiny_policy
from agentsgym.testing import chat_tokenizer
from agentsgym.tiny import tiny_tokenizer
from agentsgym.tokens.unknown_words import unknown_id, unknown_words
from agentsgym.training import tiny_imitation_config

WORDS = ["You are in the hall.", "It is a clock?", *"123456789"]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_unknown_words_are_read_where_they_stand() -> None:
    tokenizer = tiny_tokenizer(WORDS)
    assert unknown_words(tokenizer, ["It is a clock?", "in the garden. You are a zebra\tin the garden."]) == [
        "in",
        "garden.",
        "You",
        "a zebra",
        "\t",
    ]
    assert unknown_words(tokenizer, WORDS) == []


def test_a_tokenizer_that_reads_everything_or_whose_unknown_token_ends_texts_names_none() -> None:
    tokenizer: Any = chat_tokenizer()
    assert unknown_words(tokenizer, ["\u2603 garden"]) == []
    tokenizer.unk_token = tokenizer.eos_token  # as GPT-2 has it
    assert unknown_id(tokenizer) is None


def test_a_tokenizer_in_plain_python_is_called_word_by_word() -> None:
    tokenizer = LetterTokenizer(unk_token="\0", eos_token="<e>", pad_token="<p>")
    assert unknown_words(tokenizer, ["ab \u2603c d\u2603"]) == ["\u2603c", "d\u2603"]


def test_what_is_played_with_words_that_nobody_can_read_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    env = GuessEnv(tiny_tokenizer(WORDS))
    for _ in range(2):
        evaluate(env, Counting(), tasks(2, 3))
    [warning] = warnings_of(caplog)
    assert warning.startswith("the tokenizer has no token for '")
    assert "<|unknown|>" in warning
    assert "vocabulary_texts" in warning
    other = GuessEnv(tiny_tokenizer(WORDS))
    other.rollout(tasks(1), Counting())
    assert len(warnings_of(caplog)) == 2


def test_what_can_be_read_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    played = GuessEnv().rollout(tasks(2), Counting())
    texts = [message["content"] for one in played for message in one.messages]
    GuessEnv(tiny_tokenizer(texts)).rollout(tasks(2), Counting())
    assert warnings_of(caplog) == []


def test_check_env_names_what_the_agent_answers_and_the_tokenizer_does_not_know() -> None:
    texts = [
        message["content"] for one in GuessEnv().rollout(tasks(*range(1, 10)), Counting()) for message in one.messages
    ]
    lost = ScriptedAgent(["no number"], repeat_last=True)
    texts += [message["content"] for one in GuessEnv().rollout(tasks(1), lost) for message in one.messages]
    env = GuessEnv(tiny_tokenizer(texts))
    agent = ScriptedAgent(["nine lives"], repeat_last=True)
    findings = check_env(env, tasks(1, 2, 3, 4), agent).findings
    [output] = [finding.text for finding in findings if "the agent writes" in finding.text]
    assert output == "the tokenizer cannot encode words that the agent writes, such as 'nine', 'lives'"
    assert not any("the prompts contain" in finding.text for finding in findings)


def test_an_imitation_warns_of_words_that_its_model_cannot_read(caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = tiny_policy(WORDS, hidden_size=16)
    trajectories = GuessEnv(tokenizer).rollout(tasks(2), Counting())
    other = tiny_tokenizer(WORDS)  # has not been warned of
    imitate(model, trajectories, other, tiny_imitation_config(1))
    assert [warning.partition(" '")[0] for warning in warnings_of(caplog)] == ["the tokenizer has no token for"] * 2


def test_demonstrations_of_a_larger_tokenizer_than_the_models_are_refused() -> None:
    model, tokenizer = tiny_policy(WORDS, hidden_size=16)
    trajectories = GuessEnv(chat_tokenizer()).rollout(tasks(2), Counting())
    with pytest.raises(
        ConfigError, match=r"has the token id \d+, but the model has embeddings for 21 ids.*model's tokenizer"
    ):
        imitate(model, trajectories, tokenizer, tiny_imitation_config(1))


def test_an_agent_that_reads_other_ids_than_the_environment_writes_is_refused() -> None:
    model, tokenizer = tiny_policy(WORDS, hidden_size=16)
    agent = PolicyAgent(model, tokenizer)
    with pytest.raises(ConfigError, match=r"PolicyAgent works on token ids, .*agent\.tokenizer"):
        GuessEnv(tiny_tokenizer(WORDS[:1])).rollout(tasks(1), agent)
    [played] = GuessEnv(tiny_tokenizer(WORDS)).rollout(tasks(1), agent, max_turn_tokens=2)
    assert not played.failed
