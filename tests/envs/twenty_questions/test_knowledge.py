from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from agentsgym.envs.TwentyQuestions.knowledge import (
    DEMO_OBJECTS,
    DEMO_PROPERTIES,
    OBJECTS_FILE,
    PROPERTIES_FILE,
    expand,
    load_knowledge,
    read_knowledge,
)
from agentsgym.errors import ConfigError
from tools.check_knowledge import balance, check_files, main


def test_the_shipped_files_have_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_files() == []
    assert main([]) == 0
    assert "no fault" in capsys.readouterr().out


def test_the_knowledge_base_is_large_enough() -> None:
    knowledge = load_knowledge()
    num_hard = sum(known.hard for known in knowledge.objects.values())
    assert num_hard >= 120
    assert len(knowledge.objects) - num_hard >= 250
    assert len(knowledge.properties) >= 120
    assert len({known.category for known in knowledge.objects.values()}) >= 12
    assert all(counts["yes"] and counts["no"] for counts in balance(knowledge).values())


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("dog", "alive", "yes"),
        ("whale", "eggs", "no"),
        ("owl", "fly", "yes"),
        ("knife", "sharp", "yes"),
        ("snake", "legs", "no"),
        ("car", "wheels", "yes"),
        ("car", "red", "sometimes"),
        ("bread", "man_made", "yes"),
    ],
)
def test_facts_that_anybody_would_agree_with(name: str, key: str, value: str) -> None:
    assert load_knowledge().value(name, key) == value


def test_the_page_of_the_facts_lists_every_property() -> None:
    page = (Path(__file__).parents[3] / "docs" / "twenty-questions-facts.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*load_knowledge().properties]


IMPLICATIONS = (
    *(("mammal", "animal"), ("bird", "animal"), ("fish", "animal"), ("insect", "animal"), ("reptile", "animal")),
    *(("animal", "alive"), ("pet", "animal"), ("zoo", "animal"), ("tree", "plant"), ("bird", "feathers")),
    *(("bird", "beak"), ("bird", "wings"), ("bird", "eggs"), ("mammal", "backbone"), ("bird", "backbone")),
    *(("fish", "backbone"), ("reptile", "backbone"), ("fish", "swim"), ("fish", "water"), ("four_legs", "legs")),
    *(("pocket", "one_hand"), ("one_hand", "lift"), ("house", "car"), ("car", "bigger"), ("bigger", "shoebox")),
    *(("shoebox", "fist"), ("clothing", "wearable"), ("jewelry", "wearable"), ("head", "wearable")),
    *(("battery", "electric"), ("screen", "electric"), ("electronic", "electric"), ("vehicle", "ride")),
    *(("dessert", "sweet"), ("instrument", "music"), ("music", "noise"), ("drink", "liquid"), ("toy", "play")),
    *(("appliance", "home"), *((key, "man_made") for key in ("appliance", "vehicle", "furniture", "tool", "toy"))),
    *((key, "man_made") for key in ("instrument", "weapon", "building", "clothing")),
)
EXCLUSIONS = (
    *(("alive", "man_made"), ("mammal", "bird"), ("mammal", "fish"), ("mammal", "insect"), ("bird", "fish")),
    *(("reptile", "fish"), ("animal", "plant"), ("edible", "drink"), ("bigger", "pocket"), ("bigger", "one_hand")),
    *(("car", "lift"), ("building", "lift"), ("wood", "plastic"), ("metal", "cloth"), ("metal", "wood")),
    *(("cloth", "paper"), ("stone", "wood"), ("liquid", "alive"), ("fur", "feathers"), ("cold", "hot")),
)


@pytest.mark.parametrize(("key", "implied"), IMPLICATIONS)
def test_what_has_one_property_has_the_other(key: str, implied: str) -> None:
    for name, known in load_knowledge().objects.items():
        value, other = known.values[key], known.values[implied]
        assert not (value == "yes" and other != "yes"), name
        assert not (value == "sometimes" and other == "no"), name


@pytest.mark.parametrize(("key", "other"), EXCLUSIONS)
def test_what_has_one_property_lacks_the_other(key: str, other: str) -> None:
    both = [
        name for name, known in load_knowledge().objects.items() if known.values[key] == known.values[other] == "yes"
    ]
    assert both == []


def test_only_animals_and_one_plant_eat_meat() -> None:
    known = load_knowledge().objects.values()
    assert [one.name for one in known if one.values["eats_meat"] == "yes" != one.values["animal"]] == ["Venus flytrap"]


def test_sizes_are_transitive() -> None:
    knowledge = load_knowledge()
    sizes = ("fist", "shoebox", "bigger", "car", "house")
    for known in knowledge.objects.values():
        ranks = [("no", "sometimes", "yes").index(known.values[size]) for size in sizes]
        assert ranks == sorted(ranks, reverse=True), known.name


def test_the_rows_of_the_demo_differ() -> None:
    knowledge = load_knowledge()
    rows = [tuple(knowledge.value(name, key) for key in DEMO_PROPERTIES) for name in DEMO_OBJECTS]
    assert len(DEMO_OBJECTS) >= 20
    assert len(DEMO_PROPERTIES) >= 16
    assert len(set(rows)) == len(rows)


def test_expand_writes_out_every_alternative() -> None:
    assert expand("(a/an/) b (c/d)") == ["a b c", "a b d", "an b c", "an b d", "b c", "b d"]


def mended(tmp_path: Path, source: Path, change: Any) -> Path:
    with source.open(newline="") as file:
        rows = list(csv.reader(file))
    change(rows)
    path = tmp_path / source.name
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    return path


def set_cell(line: int, column: str, text: str) -> Any:
    def change(rows: list[list[str]]) -> None:
        rows[line - 1][rows[0].index(column)] = text

    return change


def copy_facts(rows: list[list[str]]) -> None:
    rows[4][6:] = rows[3][6:]
    rows[4][6] += " toy"  # one difference is too few


@pytest.mark.parametrize(
    ("change", "line", "word"),
    [
        (set_cell(3, "yes", "alive alife"), 3, "yes contains the unknown property 'alife'"),
        (set_cell(3, "sometimes", "pet"), 3, "yes and sometimes contain 'pet' twice"),
        (set_cell(4, "aliases", "puppy"), 4, "'puppy'"),
        (set_cell(5, "hard", ""), 5, "hard must be"),
        (set_cell(6, "article", "that"), 6, "article must be"),
        (copy_facts, 5, "'cow' and 'horse' (line 4) must differ in at least 2"),
        (lambda rows: rows[7].pop(), 8, "the row must have 8 cells, got 7: that of sometimes is missing"),
        (set_cell(3, "aliases", "tom\ncat"), 3, "a cell must not contain a line break"),
        (lambda rows: rows.insert(7, rows[6]), 8, "object must be a name that no other row has"),
        (set_cell(3, "object", ""), 3, "object must be a name that no other row has, got ''"),
        (lambda rows: rows[0].__setitem__(7, "plants"), 1, "columns"),
    ],
)
def test_faults_of_the_objects_are_named_with_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, line: int, word: str
) -> None:
    path = mended(tmp_path, OBJECTS_FILE, change)
    assert main([str(path), str(PROPERTIES_FILE)]) == 1
    error = capsys.readouterr().err
    assert f"knowledge.csv:{line}: " in error
    assert word in error


@pytest.mark.parametrize(
    ("change", "line", "word"),
    [
        (set_cell(3, "question", "Is it alive?"), 3, "is also a question of alive"),
        (set_cell(4, "not", "is it considered a plant"), 4, "although it is listed as a neighbor"),
        (set_cell(4, "phrases", "plant; !animal"), 4, "'animal' is understood as nothing"),
        (lambda rows: rows[7].append("kept"), 8, "must have 4 cells, got 5"),
        (lambda rows: rows[0].__setitem__(2, "words"), 1, "columns"),
    ],
)
def test_faults_of_the_questions_are_named_with_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, line: int, word: str
) -> None:
    path = mended(tmp_path, PROPERTIES_FILE, change)
    assert main([str(OBJECTS_FILE), str(path)]) == 1
    error = capsys.readouterr().err
    assert f":{line}: " in error
    assert word in error


@pytest.mark.parametrize(
    ("source", "change", "sentence"),
    [
        (OBJECTS_FILE, set_cell(3, "yes", "alife"), "knowledge.csv:3: yes contains the unknown property 'alife'"),
        (OBJECTS_FILE, lambda rows: rows[7].pop(), "knowledge.csv:8: the row must have"),
        (PROPERTIES_FILE, lambda rows: rows[7].pop(), "properties.csv:8: the row must have 4 cells, got 3"),
        (
            PROPERTIES_FILE,
            lambda rows: rows.append(rows[7]),
            f"properties.csv:{len(load_knowledge().properties) + 2}: property must be a name that no other",
        ),
    ],
)
def test_a_broken_row_is_not_loaded(tmp_path: Path, source: Path, change: Any, sentence: str) -> None:
    paths = {OBJECTS_FILE: OBJECTS_FILE, PROPERTIES_FILE: PROPERTIES_FILE, source: mended(tmp_path, source, change)}
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_knowledge(*paths.values())


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "knowledge.csv"
    path.write_bytes(b"\xef\xbb\xbf" + OBJECTS_FILE.read_bytes())
    assert read_knowledge(path).objects == load_knowledge().objects


def test_a_file_that_is_not_utf_8_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "knowledge.csv"
    path.write_bytes(OBJECTS_FILE.read_bytes().replace(b"cat,a,cats", b"caf\xe9,a,cats"))
    with pytest.raises(ConfigError, match=r"^knowledge.csv:3: the file must be UTF-8"):
        read_knowledge(path)
