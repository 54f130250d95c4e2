"""Rows of a user's data: files, lists and datasets, and what is reported of those that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from agentsgym.envs.datasets.sources import Column, read_columns, read_rows
from agentsgym.errors import ConfigError

COLUMNS = {
    "text": Column(default="text", valid=lambda one: isinstance(one, str), expected="a str"),
    "title": Column(default="title", valid=lambda one: isinstance(one, str), expected="a str", is_optional=True),
}
ROWS = [{"text": "a", "title": "A"}, {"text": "b", "title": None}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


@pytest.mark.parametrize("kind", ["list", "file", "dataset", "loaded"])
def test_rows_are_read_from_whatever_holds_them(file: Path, kind: str) -> None:
    blank = "" if kind == "loaded" else "\n"  # datasets 4.8 does not accept blank lines
    file.write_text(f'{{"text": "a", "title": "A"}}\n{blank}{{"text": "b", "title": null}}\n')
    cache = str(file.parent / "cache")
    loaded = {"path": "json", "data_files": str(file), "split": "train", "cache_dir": cache}
    source: Any = {"list": ROWS, "file": str(file), "dataset": Dataset.from_list(ROWS), "loaded": loaded}[kind]
    read = read_columns(read_rows(source, "data"), COLUMNS, None, "data")
    assert read == [{"text": "a", "title": "A"}, {"text": "b"}]


def test_a_file_may_begin_with_a_byte_order_mark(file: Path) -> None:
    file.write_text('{"text": "a"}\n', encoding="utf-8-sig")
    assert read_rows(file, "data") == [{"text": "a"}]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('{"text": "a"}\n{"text"', r"rows\.jsonl:2 must be a JSON object"),
        ("[1]", r"rows\.jsonl:1 must be a JSON object, got \[1\]"),
        ("", "at least one row"),
        (b"\xff\xfe", "cannot be read"),
        ("[" * 100_000, "must be a JSON object"),
    ],
)
def test_files_that_hold_no_rows_are_refused(file: Path, content: str | bytes, error: str) -> None:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=error):
        read_rows(str(file), "data")


def test_a_missing_split_is_named(file: Path) -> None:
    file.write_text('{"text": "a"}\n')
    source = {"path": "json", "data_files": str(file), "cache_dir": str(file.parent / "cache")}
    with pytest.raises(ConfigError, match=r"has several splits.*choose one, as in split='train'"):
        read_rows(source, "data")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        read_rows({"path": str(file.parent / "nothing"), "split": "train"}, "data")


def test_pickles_are_not_loaded(file: Path) -> None:
    with pytest.raises(ConfigError, match="because it unpickles files"):
        read_rows({"path": "pandas", "data_files": str(file), "split": "train"}, "data")


@pytest.mark.parametrize(
    ("row", "names", "error"),
    [
        ({"txt": "a"}, None, r"data\[1\] has no column 'text', from which 'text' is read; did you mean 'txt'"),
        ({"text": "a"}, {"title": "name"}, r"has no column 'name', from which 'title' is read"),
        ({"text": "a"}, {"body": "text"}, "columns has the unknown key 'body'; valid names: 'text', 'title'"),
        ({"text": None}, None, r"data\[1\]\['text'\] must be a str, got None"),
        ("a", None, r"data\[1\] must be a dict, got 'a'"),
    ],
)
def test_missing_columns_and_wrong_values_are_named(row: Any, names: Any, error: str) -> None:
    rows: Any = [{"text": "a", "name": "n"}, row]
    with pytest.raises(ConfigError, match=error):
        read_columns(rows, COLUMNS, names, "data")
