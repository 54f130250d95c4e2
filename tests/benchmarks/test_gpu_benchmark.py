"""The benchmark of a GPU measures at a tiny size, loses nothing that it measured, and reports what it left out."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_measures
from benchmarks.gpu_measures import SIZES, Setup

TINY = SIZES["tiny"]
pytestmark = pytest.mark.filterwarnings("default")  # TRL's trainers


@pytest.fixture(autouse=True, scope="module")
def _garbage_is_collected_again() -> Generator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """A tiny random model in a folder."""
    return Setup(gpu_measures.random_model("tiny", tmp_path_factory.mktemp("model")), "cpu", TINY)


def run(results: Path, *options: str) -> int:
    return gpu.main(["--device", "cpu", "--size", "tiny", "--results", str(results), *options])


def found(results: Path, table: str) -> Any:
    return json.loads((results / f"gpu_{table}.json").read_text())


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a whole run without vLLM."""
    results, find, page = tmp_path_factory.mktemp("results"), importlib.util.find_spec, gpu.PAGE.read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "vllm" else find(name, *more))
        for before, (name, table) in enumerate(gpu.TABLES.items()):

            def rows(setup: Setup, folder: Path, before: int = before, table: gpu.Table = table) -> Any:
                assert len([*results.iterdir()]) == before, "a table is written before the next one begins"
                return table.rows(setup, folder)

            patch.setitem(gpu.TABLES, name, table._replace(rows=rows))
        assert run(results) == 0
    assert gpu.PAGE.read_text() == page
    return results


def test_every_table_has_medians_with_ranges_and_names_what_is_left_out(dry: Path) -> None:
    tables = {name: found(dry, name) for name in gpu.TABLES}
    rows = {name: {key.rpartition(": ")[0] for key in table["figures"]} for name, table in tables.items()}
    assert {name: len(own) for name, own in rows.items()} == {
        "sampling": 4, "steps": 5, "gap": 2, "sharing": 3, "memory": 4,
    }  # fmt: skip
    left_out = {"the model alone, compiled": "compiled on GPUs only", "vLLM": "vLLM is not installed"}
    assert {name: table["left_out"] for name, table in tables.items() if table["left_out"]} == {"sampling": left_out}
    rates = tables["sampling"]["figures"]
    assert 0 < rates["`PolicyAgent`: rate"]["low"] < rates["`PolicyAgent`: rate"]["high"]
    assert rates["the model alone: relative"] == {"value": 1, "low": 1, "high": 1}
    assert all(one["value"] > 0 for one in tables["steps"]["figures"].values())
    text = gpu.section(dry)
    assert "`random-tiny` on a CPU" in text
    assert "| vLLM | vLLM is not installed |  |" in text


def test_gaps_of_precisions_and_of_shared_prefixes_are_those_of_rounding(dry: Path) -> None:
    gap, sharing = (
        {key: one["value"] for key, one in found(dry, name)["figures"].items()} for name in ("gap", "sharing")
    )
    assert gap["float32: largest"] < 1e-5 < gap["bfloat16: largest"] < 1
    assert gap["bfloat16: mean"] <= gap["bfloat16: largest"]
    assert sharing["float32: logprob"] < 1e-5 < sharing["bfloat16 and float32, both without: logprob"]
    assert 0 < sharing["float32: gradient"] < 1e-5 < sharing["bfloat16 and float32, both without: gradient"] < 0.1


def test_memory_is_measured_by_length(dry: Path) -> None:
    tokens = [one["value"] for key, one in found(dry, "memory")["figures"].items() if key.endswith("tokens")]
    assert 32 <= tokens[0] == tokens[1] < tokens[2] == tokens[3] <= 192


def test_the_bare_model_runs_as_many_tokens_as_the_episodes_have(setup: Setup) -> None:
    policy = gpu_measures.load(setup)
    assert len(policy.tokenizer) == policy.model.config.vocab_size == gpu_measures.SHAPES["tiny"][0]
    counts: list[int] = []
    hook = policy.model.register_forward_pre_hook(lambda _, args: counts.append(args[0].numel()))
    gpu_measures.play_bare(policy, TINY)
    hook.remove()
    played = gpu_measures.play(gpu_measures.policy_agent(policy), policy.tokenizer, TINY)
    answers = TINY.turns * gpu_measures.ANSWER_TOKENS
    assert [sum(one.agent_token_mask) for one in played] == [answers] * TINY.episodes
    assert abs(sum(counts) - sum(len(one.token_ids) - TINY.turns for one in played)) <= 2 * len(played)


def test_a_compiled_model_computes_the_same(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    last: list[torch.Tensor] = []
    bare = gpu_measures.play_bare
    monkeypatch.setattr(gpu_measures, "play_bare", lambda *given: last.append(bare(*given)))
    for samples in (gpu_measures.bare(setup), gpu_measures.compiled(setup, backend="eager")):
        assert next(samples)["rate"] > 0
    assert len(last) == 4, "each warms up"
    for logits in last:
        torch.testing.assert_close(logits, last[0], rtol=1e-4, atol=1e-5)


def rows_of(**numbers: Any) -> Any:
    """Rows whose samples are given numbers, an error that is raised, or a reason."""

    def row(given: Any) -> Any:
        for one in given:
            if isinstance(one, BaseException):
                raise one
            order.append(one)
            yield {"rate": one}

    order: list[float] = []
    return lambda *_: {name: one if isinstance(one, str) else row(one) for name, one in numbers.items()}, order


def test_rows_take_turns_and_one_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, order = rows_of(a=[2.0, 4.0], b=[1.0, 8.0], c=[RuntimeError("no memory")], d=[3.0, math.nan])
    monkeypatch.setitem(gpu.TABLES, "sampling", gpu.TABLES["sampling"]._replace(rows=rows))
    assert run(tmp_path, "--only", "sampling") == 0
    assert order[:3] + order[4:] == [2, 1, 3, 8, 4]
    table = found(tmp_path, "sampling")
    assert table["left_out"] == {"c": "RuntimeError: no memory", "d": "1 of 2 samples: it is not finite: {'rate': nan}"}
    assert table["figures"]["b: rate"] == {"value": 4.5, "low": 1, "high": 8}
    assert table["figures"]["b: relative"] == {"value": 1.25, "low": 0.5, "high": 2}
    text = gpu.section(tmp_path)
    for line in (
        "| b | 4 (1 to 8) | 1.25 (0.50 to 2.00) |",
        "| d (1 of 2 samples: it is not finite: {'rate': nan}) | 3 | 1.50 |",
        "| c | RuntimeError: no memory |  |",
        "Not measured yet: steps, gap, sharing, memory.",
    ):
        assert line in text.splitlines()


def test_a_run_that_is_killed_keeps_what_it_measured_and_every_other_table(
    dry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in dry.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = {name: found(tmp_path, name) for name in gpu.TABLES}
    rows, _ = rows_of(a=[2.0, 4.0], b=[1.0, SystemExit("killed")], c=[5.0])
    monkeypatch.setitem(gpu.TABLES, "sampling", gpu.TABLES["sampling"]._replace(rows=rows))
    with pytest.raises(SystemExit, match="killed"):
        run(tmp_path, "--only", "sampling")
    killed = found(tmp_path, "sampling")
    assert [key for key in killed["figures"] if key.endswith("rate")] == ["a: rate", "b: rate", "c: rate"]
    assert killed["left_out"] == {"a": "1 of 2 samples: the run ended", "b": "1 of 2 samples: the run ended"}
    rows, _ = rows_of(a=[RuntimeError("none")])
    monkeypatch.setitem(gpu.TABLES, "sampling", gpu.TABLES["sampling"]._replace(rows=rows))
    assert run(tmp_path, "--only", "sampling") == 1
    assert found(tmp_path, "sampling") == killed, "nothing was measured: the earlier figures stay"
    assert {name: found(tmp_path, name) for name in before if name != "sampling"} == {
        name: table for name, table in before.items() if name != "sampling"
    }


def test_a_row_and_a_run_end_when_their_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = rows_of(a=[2.0, 4.0])
    monkeypatch.setitem(gpu.TABLES, "sampling", gpu.TABLES["sampling"]._replace(rows=rows))
    assert run(tmp_path, "--only", "sampling", "--row-seconds", "0") == 0
    assert found(tmp_path, "sampling")["left_out"] == {"a": "1 of 2 samples: the 0 s of a row were over"}
    assert run(tmp_path / "none", "--only", "sampling", "--seconds", "60") == 1
    assert found(tmp_path / "none", "sampling")["left_out"] == {"a": "too little of the run's 60 s was left"}


def test_the_page_has_what_was_measured(dry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = gpu.PAGE.read_text()
    assert gpu.page_with(page, gpu.section(gpu.RESULTS)) == page
    monkeypatch.setattr(gpu, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(gpu, "RESULTS", dry)
    gpu.PAGE.write_text(page)
    for _ in range(2):
        assert gpu.main(["--page"]) == 0
        assert gpu.PAGE.read_text() == gpu.page_with(page, gpu.section(dry))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_reports_it_and_leaves_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    before = gpu.PAGE.read_text()
    assert gpu.main([]) == 3
    assert capsys.readouterr().err == "no GPU is at hand: nothing was measured, and benchmarks.md is as it was\n"
    assert gpu.PAGE.read_text() == before
