"""Measure on a GPU: sampling over many turns, training steps, log-probabilities, shared prefixes, memory by length.

    python -m benchmarks.gpu                      # less than ten minutes; writes the section of docs/benchmarks.md
    python -m benchmarks.gpu --model ~/Qwen3-0.6B # a model of yours, in place of SmolLM2-135M
    python -m benchmarks.gpu --random             # random weights of SmolLM2-135M's shape; --random 1b: of a larger one
    python -m benchmarks.gpu --only steps         # one table; the others stay
    python -m benchmarks.gpu --page               # writes the section from the results, and measures nothing

Nothing is downloaded. Each table is a file, ``benchmarks/results/gpu_TABLE.json``, written after every sample, so that
a run that is killed loses one sample. The rows of a table take turns, every second time in reverse. What is not
installed, fails, or has no time left is left out with its reason. Without a GPU the script reports that, changes
nothing, and exits with status 3. ``--device cpu --size tiny`` runs the same code in a minute, to check that it works;
its numbers mean nothing and are written only where ``--results`` is given.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from agentsgym.texts import sentence_of
from benchmarks.credit_report import markdown_table
from benchmarks.gpu_measures import (
    SHAPES,
    SIZES,
    Rows,
    Sample,
    Setup,
    gap_rows,
    random_model,
    sampling_rows,
    sharing_rows,
)
from benchmarks.gpu_steps import MEMORY_TURNS, memory_rows, step_rows
from benchmarks.record import Figure, median, record
from benchmarks.stock_trl import ANSWER_TOKENS

PAGE: Final = Path(__file__).parent.parent / "docs" / "benchmarks.md"
RESULTS: Final = Path(__file__).parent / "results"
BEGIN, END = "<!-- gpu:begin -->", "<!-- gpu:end -->"
NO_GPU: Final = 3  # the exit status


class Table(NamedTuple):
    """A table of the page."""

    rows: Callable[[Setup, Path], Rows]
    text: str  # precedes it, with the amounts of Size in braces
    columns: Mapping[str, tuple[str, str]]  # header and format of each figure
    compared: str | None = None  # the figure that is also given relative to the first row's of the same round


TABLES: Final = {
    "sampling": Table(
        sampling_rows,
        f"**Sampling**: {{episodes}} episodes of {{turns}} turns, {ANSWER_TOKENS} tokens per turn. The model alone "
        "runs as many tokens with a KV cache and takes the likeliest, without a game; compiled, passes of one token "
        "are `torch.compile`d, with CUDA graphs.",
        {"rate": ("agent tokens per second", ",.0f"), "relative": ("relative to the model alone", ".2f")},
        "rate",
    ),
    "steps": Table(
        step_rows,
        "**A training step**, rollouts included: {episodes} episodes of {train_turns} turns. By hand means `generate` "
        "on the whole history at each turn.",
        {
            "step_s": ("step, s", ".2f"),
            "relative": ("relative to `GRPOEnvTrainer`", ".2f"),
            "peak_gb": ("peak memory, GB", ".1f"),
        },
        "step_s",
    ),
    "gap": Table(
        gap_rows,
        "**Sampler and trainer**: the difference between the log-probability of a token when it was sampled, turn by "
        "turn with a KV cache, and in one pass over the trajectory.",
        {"mean": ("mean", ".2g"), "largest": ("largest", ".2g"), "kl": ("KL (k3)", ".2g")},
    ),
    "sharing": Table(
        sharing_rows,
        "**Shared prefixes**: loss and gradient of a group of 8 rollouts with a prompt of 500 tokens, computed with "
        "and without sharing. The last row is what rounding alone changes.",
        {
            "ratio": ("time without / with", ".2f"),
            "logprob": ("largest difference of a log-probability", ".2g"),
            "gradient": ("difference of the gradient, relative", ".2g"),
        },
    ),
    "memory": Table(
        memory_rows,
        f"**Memory by length**: one step over at most 8 rollouts of {MEMORY_TURNS} turns with long observations, in "
        "one micro-batch, with activations kept or recomputed; all weights trained.",
        {"tokens": ("tokens per rollout", ",.0f"), "peak_gb": ("peak memory, GB", ".1f"), "step_s": ("step, s", ".2f")},
    ),
}


class Budget:
    """The seconds that a row and a run may take. They are checked before each sample, not during one."""

    def __init__(self, row_s: float, run_s: float) -> None:
        self.row_s, self.run_s, self.begun = row_s, run_s, time.monotonic()
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.last: dict[str, float] = {}

    def exceeded(self, row: str) -> str | None:
        """Why a row gets no further sample; None if there is time."""
        if self.spent[row] > self.row_s:
            return f"the {self.row_s:.0f} s of a row were over"
        if time.monotonic() - self.begun + self.last.get(row, self.row_s) > self.run_s:
            return f"too little of the run's {self.run_s:.0f} s was left"
        return None

    @contextlib.contextmanager
    def charging(self, row: str) -> Generator[None]:
        """Charge a row for a sample."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.last[row] = time.monotonic() - start
            self.spent[row] += self.last[row]


def measure(name: str, setup: Setup, folder: Path, results: Path, budget: Budget) -> bool:
    """Measure a table, and write it into the folder of results after every sample.

    Returns whether there is a figure; a table without one does not replace an earlier one.
    """
    rows = TABLES[name].rows(setup, folder / name)
    left_out = {row: source if isinstance(source, str) else _note(0, 0, None) for row, source in rows.items()}
    sources = {row: source for row, source in rows.items() if not isinstance(source, str)}
    samples: dict[str, list[Sample]] = {row: [] for row in sources}
    planned, about = setup.size.samples, {"model": Path(setup.model).name, "size": setup.size._asdict()}
    for number in range(planned):
        for row in [*sources][:: -1 if number % 2 else 1]:
            sample, problem = _sample(f"{name}: {row}", sources[row], budget)
            if sample is None:
                sources.pop(row).close()
            else:
                samples[row].append(sample)
            left_out[row] = _note(len(samples[row]), planned, problem)
            if problem is None and (sample is None or len(samples[row]) == planned):
                del left_out[row]
            figures = figures_of(samples, TABLES[name].compared)
            if figures or not (results / f"gpu_{name}.json").exists():
                record(results, f"gpu_{name}", figures, [0], None, left_out=left_out, **about)
    for source in sources.values():
        source.close()
    return any(samples.values())


def _note(taken: int, planned: int, problem: str | None) -> str:
    """Why a row has fewer samples than planned."""
    reason = problem or "the run ended"
    return f"{taken} of {planned} samples: {reason}" if taken else reason


def _sample(name: str, source: Iterator[Sample], budget: Budget) -> tuple[Sample | None, str | None]:
    """Take a sample; without one, return why there is none, or None if the row has no more."""
    if problem := budget.exceeded(name):
        return None, problem
    try:
        with budget.charging(name):
            sample = next(source, None)
    except Exception as error:  # for example out of memory: the other rows are still useful
        logging.getLogger(__name__).exception("%s could not be measured", name)
        return None, f"{type(error).__name__}: {sentence_of(error, 100)}"
    if sample is None:
        return None, None
    print(f"{name}: {sample}", file=sys.stderr, flush=True)
    is_finite = all(map(math.isfinite, sample.values()))
    return (sample, None) if is_finite else (None, f"it is not finite: {dict(sample)}")


def figures_of(samples: Mapping[str, list[Sample]], compared: str | None) -> dict[str, Figure]:
    """Medians and ranges, as ``ROW: FIGURE``."""
    figures: dict[str, Figure] = {}
    base = next(iter(samples.values()), list[Sample]())
    for row, own in samples.items():
        figures |= {f"{row}: {key}": median([one[key] for one in own]) for key in (own[0] if own else ())}
        ratios = [one[compared] / other[compared] for one, other in zip(own, base, strict=False) if compared]
        figures |= {f"{row}: relative": median(ratios)} if ratios else {}
    return figures


def section(results: Path) -> str:
    """Write the tables as a section of a page."""
    paths = {name: results / f"gpu_{name}.json" for name in TABLES}
    parts = [_written(TABLES[name], json.loads(path.read_text())) for name, path in paths.items() if path.exists()]
    missing = ", ".join(name for name, path in paths.items() if not path.exists())
    return "\n\n".join([*parts, f"Not measured yet: {missing}."] if missing else parts)


def _written(table: Table, found: Mapping[str, Any]) -> str:
    figures, left_out, where = found["figures"], found["left_out"], found["machine"]
    versions = ", ".join(f"{name} {where[name]}" for name in ("torch", "transformers", "trl"))
    text = (
        f"{table.text.format(**found['size'])} `{found['model']}` on {where['gpu'] or 'a CPU'} ({versions}), "
        f"{found['date']}; medians of up to {found['size']['samples']} samples, with their range."
    )
    rows: list[list[str]] = []
    for row in dict.fromkeys([*(key.rpartition(": ")[0] for key in figures), *left_out]):
        cells = [_cell(figures.get(f"{row}: {key}"), form) for key, (_, form) in table.columns.items()]
        reason = left_out.get(row)
        rows.append([f"{row} ({reason})" if any(cells) and reason else row, *cells])
        if not any(cells):
            rows[-1][1] = reason or ""
    return f"{text}\n\n{markdown_table(['', *(header for header, _ in table.columns.values())], rows)}"


def _cell(figure: Figure | None, form: str) -> str:
    if figure is None:
        return ""
    value, low, high = (format(figure[key], form) for key in ("value", "low", "high"))
    return value if low == high else f"{value} ({low} to {high})"


def page_with(page: str, text: str) -> str:
    """Put the section between the page's markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"


def write_page() -> None:
    """Write the page's section from the results."""
    PAGE.write_text(page_with(PAGE.read_text(), section(RESULTS)))


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="folder or name of a model; default: smollm2")
    parser.add_argument("--random", nargs="?", const="135m", choices=[*SHAPES], help="random weights of this shape")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")
    parser.add_argument("--size", choices=[*SIZES], default="full", help="default: full; tiny means --random tiny")
    parser.add_argument("--only", nargs="+", choices=[*TABLES], default=[*TABLES], help="tables to measure")
    parser.add_argument("--results", type=Path, help="folder of the results; default: benchmarks/results")
    parser.add_argument("--page", action="store_true", help="write the page from the results, and measure nothing")
    parser.add_argument("--row-seconds", type=float, default=90.0, help="after which a row ends; default: 90")
    parser.add_argument("--seconds", type=float, default=520.0, help="after which the run ends; default: 520")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write, print; returns the exit status."""
    options = options_of(arguments)
    if options.page:
        write_page()
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU is at hand: nothing was measured, and {PAGE.name} is as it was", file=sys.stderr)
        return NO_GPU
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    if options.device == "cpu":
        torch.set_num_threads(1)  # on busy cores, several wait for each other
    gc.freeze()  # each collection of garbage would look through all that was imported
    budget, is_real = Budget(options.row_seconds, options.seconds), (options.device, options.size) == ("cuda", "full")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        results = options.results or (RESULTS if is_real else folder / "results")
        shape = options.random or ("tiny" if options.size == "tiny" else None)
        model = random_model(shape, folder / f"random-{shape}") if shape else options.model
        setup, measured = Setup(model, options.device, SIZES[options.size]), list[bool]()
        for name in options.only:
            measured.append(measure(name, setup, folder, results, budget))
            if results == RESULTS:
                write_page()
        print(section(results))
    return 0 if all(measured) else 1


if __name__ == "__main__":
    sys.exit(main())
