"""Search without an environment: BM25 by its formula, exact match and F1 by hand, and the generated world."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsgym.envs.Search import corpus as corpus_module
from agentsgym.envs.Search.corpus import IndexOptions, Passage, open_index
from agentsgym.envs.Search.env import exact_match, f1, normalized
from agentsgym.envs.Search.world import FACTS, QUESTIONS, World, path_of_question, paths_of
from agentsgym.errors import ConfigError, MissingDependencyError

WORLD = [Passage(one["title"], one["text"]) for one in World(seed=3).passages]
PLAIN = IndexOptions(title_weight=0, stopwords=None)


@pytest.fixture(autouse=True)
def _fresh_process() -> None:
    corpus_module._indexes.clear()


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def reference_scores(passages: list[Passage], query: str) -> list[float]:
    """BM25 as Lucene has it, from its formula: k1 = 1.5, b = 0.75."""
    texts = [Counter(words(one.text)) for one in passages]
    mean = sum(text.total() for text in texts) / len(texts)
    scores = [0.0] * len(texts)
    for word in words(query):
        num_with = sum(word in text for text in texts)
        idf = math.log(1 + (len(texts) - num_with + 0.5) / (num_with + 0.5))
        for place, text in enumerate(texts):
            length = 1.5 * (1 - 0.75 + 0.75 * text.total() / mean)
            scores[place] += idf * text[word] / (text[word] + length)
    return scores


@pytest.mark.parametrize("query", ["river", "born in the town", "works for a weaver", "sea km flows", "people"])
@pytest.mark.parametrize("k", [1, 5, 400, 10_000])
def test_passages_come_in_the_order_of_the_formula(query: str, k: int) -> None:
    scores = dict(zip(WORLD, reference_scores(WORLD, query), strict=True))
    found = open_index(WORLD, PLAIN, "")(query, k)
    expected = sorted((score for score in scores.values() if score > 0), reverse=True)[:k]
    assert [scores[one] for one in found] == pytest.approx(expected, rel=1e-4)
    assert len(set(found)) == len(found)


def test_ties_go_to_the_passage_that_stands_first() -> None:
    passages = [Passage(str(number), "the same words") for number in range(50)]
    assert [one.title for one in open_index(passages, PLAIN, "")("words", 3)] == ["0", "1", "2"]


@pytest.mark.parametrize("query", ["", "   ", "!?", "zzzzz", "the of"])
def test_what_shares_no_word_is_not_found(query: str) -> None:
    assert open_index(WORLD, IndexOptions(), "")(query, 3) == []


def test_title_weight_brings_up_the_passage_that_bears_the_name() -> None:
    passages = [Passage("Karvo", "A firm."), *(Passage(f"P{n}", "Karvo Karvo pays.") for n in range(3))]
    assert open_index(passages, IndexOptions(title_weight=5), "")("Karvo", 1)[0].title == "Karvo"
    assert open_index(passages, IndexOptions(title_weight=0), "")("Karvo", 1)[0].title != "Karvo"


def test_a_corpus_without_words_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one word"):
        open_index([Passage("", "!"), Passage("", "the")], IndexOptions(), "")


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'agentsgym\[search\]'"):
        open_index(WORLD, IndexOptions(), "")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds the index of WORLD."""
    monkeypatch.setattr(corpus_module, "_MIN_CACHED_PASSAGES", 10)
    open_index(WORLD, IndexOptions(), str(tmp_path))
    [folder] = tmp_path.iterdir()
    return folder


def opened_anew(
    monkeypatch: pytest.MonkeyPatch, folder: Path, passages: list[Passage] = WORLD
) -> tuple[bool, list[str]]:
    """Whether the index had to be made again in another process, and what it finds."""
    made: list[int] = []
    corpus_module._indexes.clear()
    new_ranker = corpus_module._new_ranker
    monkeypatch.setattr(corpus_module, "_new_ranker", lambda *given: made.append(1) or new_ranker(*given))
    found = open_index(passages, IndexOptions(), str(folder.parent))("born town river", 5)
    return bool(made), [one.title for one in found]


def test_an_index_is_read_from_disk_and_finds_the_same(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = [one.title for one in open_index(WORLD, IndexOptions(), "")("born town river", 5)]
    assert opened_anew(monkeypatch, kept) == (False, fresh)


def test_another_corpus_gets_an_index_of_its_own(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened_anew(monkeypatch, kept, WORLD[1:])[0]
    assert len([*kept.parent.iterdir()]) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "lose", "manifest", "no manifest"])
def test_a_damaged_index_is_made_anew(
    kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    expected = opened_anew(monkeypatch, kept)[1]
    data, manifest = kept / "data.csc.index.npy", kept / "manifest.json"
    content = data.read_bytes()
    if damage == "flip":
        data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut":
        data.write_bytes(content[:100])
    elif damage == "lose":
        data.unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.unlink()
    with caplog.at_level(logging.WARNING):
        assert opened_anew(monkeypatch, kept) == (True, expected)
    assert "is damaged and will be rebuilt" in caplog.text
    assert opened_anew(monkeypatch, kept) == (False, expected)  # and kept again
    assert json.loads(manifest.read_text())


def test_a_cache_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(corpus_module, "_MIN_CACHED_PASSAGES", 10)
    (tmp_path / "file").write_text("")
    assert open_index(WORLD, IndexOptions(), str(tmp_path / "file" / "inside"))("river", 3)
    assert "cannot be cached in" in caplog.text


@pytest.mark.parametrize(
    ("answer", "references", "match", "overlap"),
    [
        ("The Tarn.", ["tarn"], 1.0, 1.0),
        ("river tarn", ["Tarn"], 0.0, 2 / 3),
        ("Tarn", ["Velda", "an Tarn!"], 1.0, 1.0),
        ("Belmora", ["Tarn"], 0.0, 0.0),
        ("one two two", ["two two three"], 0.0, 2 / 3),  # words count as often as in both: 2 of 3 and 2 of 3
        ("", ["Tarn"], 0.0, 0.0),
        ("The", ["A"], 0.0, 0.0),  # normalization would leave nothing of both
        ("The", ["the"], 1.0, 1.0),
    ],
)
def test_answers_score_as_worked_out(answer: str, references: list[str], match: float, overlap: float) -> None:
    assert exact_match(answer, references) == match
    assert f1(answer, references) == pytest.approx(overlap)


@given(st.text(), st.text())
def test_scores_are_bounded_symmetric_and_agree_on_equality(one: str, other: str) -> None:
    assert normalized(normalized(one)) == normalized(one) or "a" in one.lower()  # "tahe" may hold an article anew
    assert 0.0 <= f1(one, [other]) <= 1.0
    assert f1(one, [other]) == pytest.approx(f1(other, [one]))
    assert exact_match(one, [other]) == exact_match(other, [one])
    if exact_match(one, [other]) and normalized(one):
        assert f1(one, [other]) == pytest.approx(1.0)


def test_a_seed_makes_the_same_world_and_another_one_another() -> None:
    assert World(seed=5).passages == World(seed=5).passages
    assert World(seed=5).passages != World(seed=6).passages


@pytest.mark.parametrize("seed", range(5))
def test_every_answer_follows_from_the_passages_alone(seed: int) -> None:
    world = World(seed=seed, num_people=30)
    text_of = {one["title"]: one["text"] for one in world.passages}
    for person in world.people:
        for path in QUESTIONS:
            task = world.task(person, path)
            entity = person
            for title, relation in zip(task["evidence"], path, strict=True):
                assert entity == title
                [entity] = FACTS[relation].findall(text_of[title])
            assert entity == task["answers"][0]
            assert path_of_question(task["question"]) == (person, path)


def test_no_two_names_share_a_word() -> None:
    world = World(num_people=3000, num_firms=1)
    words = [word for one in world.people for word in one.split()]
    assert len(set(words)) == 6000


@pytest.mark.parametrize("text", ["", "Who is it?", "Which firm does x work for?", "Which firm does A B C work for?"])
def test_other_questions_are_not_understood(text: str) -> None:
    assert path_of_question(text) is None


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="num_towns must be an int from 1"):
        World(num_towns=0)
    with pytest.raises(ConfigError, match=r"hops must be a subset of \[1, 2, 3, 4\], got \[5\]"):
        paths_of([5])
    assert {len(path) for path in paths_of([2])} == {2}
