"""Measure on a GPU: sampling over many turns, training steps of several kinds, memory by length, and bf16.

    python -m benchmarks.gpu                      # less than ten minutes; writes the section of docs/benchmarks.md
    python -m benchmarks.gpu --model ~/Qwen3-0.6B # a model of yours, in place of SmolLM2-135M
    python -m benchmarks.gpu --json               # prints one JSON object, and writes nothing

Nothing is downloaded. What is not installed (vLLM, DeepSpeed), or takes a second GPU, is left out with its reason.
Without a GPU it reports that, changes nothing, and exits with status 3. ``--device cpu --size tiny`` runs the same code
in minutes, to check that it works; its numbers mean nothing and are never written.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
import trl

from benchmarks.credit_report import markdown_table
from benchmarks.gpu_measures import SIZES, Setup, Size, measure_gap, measure_sampling
from benchmarks.gpu_steps import MEMORY_TURNS, measure_memory, measure_steps
from benchmarks.stock_trl import ANSWER_TOKENS

PAGE: Final = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- gpu:begin -->", "<!-- gpu:end -->"
NO_GPU: Final = 3  # the exit status
LAST_START_S: Final = 420.0  # nothing begins later than this, so that all is over in ten minutes
MEASURES: Final[dict[str, Callable[[Setup, Path], Any]]] = {
    "sampling": measure_sampling,
    "gap": measure_gap,
    "memory": measure_memory,
    "steps": measure_steps,
}


def measure(setup: Setup, folder: Path, names: Sequence[str] = tuple(MEASURES)) -> dict[str, Any]:
    """Take measurements; one that fails or takes too long is reported, and the others follow.

    Args:
        setup: Where and of what.
        folder: For models and runs.
        names: Which.
    """
    begun = time.monotonic()
    found: dict[str, Any] = {"machine": machine(setup), "left_out": {}}
    for name in names:
        if time.monotonic() - begun > LAST_START_S:
            found["left_out"][name] = f"{LAST_START_S:.0f} s were over"
            continue
        try:
            found[name] = MEASURES[name](setup, folder / name)
        except Exception as error:  # for example out of memory: the others are still useful
            logging.getLogger(__name__).exception("%s could not be measured", name)
            found["left_out"][name] = f"{type(error).__name__}: {error}"
    found["seconds"] = round(time.monotonic() - begun, 1)
    return found


def machine(setup: Setup) -> dict[str, str]:
    """Name what was measured on."""
    name = torch.cuda.get_device_name() if setup.device == "cuda" else "a CPU"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    return {"device": name, "model": Path(setup.model).name, **versions}


def section(found: Mapping[str, Any], size: Size) -> str:
    """Write what was found as a section of a page."""
    where = found["machine"]
    versions = ", ".join(f"{name} {where[name]}" for name in ("torch", "transformers", "trl"))
    parts = [f"`{where['model']}` on {where['device']} ({versions}), measured in {found['seconds']:.0f} s."]
    writers: dict[str, Callable[[Any, Size], str]] = {
        "sampling": _sampling, "gap": _gap, "memory": _memory, "steps": _steps,
    }  # fmt: skip
    for name, write in writers.items():
        if reason := found["left_out"].get(name):
            parts.append(f"Not measured: {name} ({reason}).")
        elif name in found:
            parts.append(write(found[name], size))
    return "\n\n".join(parts)


def _sampling(found: Mapping[str, Any], size: Size) -> str:
    rates = {"the model alone": found["model_alone"], "`PolicyAgent`": found["policy_agent"]}
    if found["vllm"] is not None:
        rates["vLLM"] = found["vllm"]
    rows = [[name, f"{rate:,.0f}", f"{rate / found['model_alone']:.2f}"] for name, rate in rates.items()]
    peak = "" if found["peak_gb"] is None else f" Peak memory {found['peak_gb']} GB."
    return (
        f"**Sampling**: {size.num_episodes} episodes of {size.num_turns} turns, {ANSWER_TOKENS} tokens per turn, "
        f"{found['parameters'] / 1e6:,.0f} million weights. The model alone runs as many tokens with a KV cache and "
        f"takes the likeliest, without a game.{peak}"
        + ("" if found["vllm"] is not None else " vLLM is not installed.")
        + "\n\n"
        + markdown_table(["", "agent tokens per second", "relative to the model alone"], rows)
    )


def _gap(found: Mapping[str, float], _: Size) -> str:
    rows = [
        [name, *(f"{found[f'{name}_{key}']:.2g}" for key in ("mean", "largest", "kl"))]
        for name in ("float32", "bfloat16")
    ]
    header = ["precision", "mean", "largest", "KL (k3)"]
    return (
        "**Sampler and trainer**: the difference between the log-probability of a token when it was sampled, turn by "
        f"turn with a KV cache, and in one pass over the trajectory.\n\n{markdown_table(header, rows)}"
    )


def _memory(found: Mapping[str, Mapping[str, Any]], size: Size) -> str:
    def cell(one: Mapping[str, Any]) -> str:
        if "left_out" in one:
            return one["left_out"]
        peak = "" if one["peak_gb"] is None else f"{one['peak_gb']} GB, "
        return f"{peak}{one['step_s']:.2f} s"

    rows = [[f"{row['tokens']:,}", cell(row["kept"]), cell(row["recomputed"])] for row in found.values()]
    return (
        f"**Memory by length**: one step over {min(8, size.num_episodes)} rollouts of {MEMORY_TURNS} turns with long "
        f"observations, in one micro-batch; all weights trained.\n\n"
        + markdown_table(["tokens per rollout", "activations kept", "recomputed"], rows)
    )


def _steps(found: Mapping[str, Mapping[str, Any]], size: Size) -> str:
    rows = [
        [name, one["left_out"], ""] if "left_out" in one else [name, f"{one['step_s']:.2f} s", _number(one["peak_gb"])]
        for name, one in found.items()
    ]
    return (
        f"**A training step**, rollouts included: {size.num_episodes} episodes of {size.num_train_turns} turns. By "
        "hand means `generate` on the whole history at each turn.\n\n"
        + markdown_table(["trainer", "step", "peak memory, GB"], rows)
    )


def _number(value: float | None) -> str:
    return "" if value is None else str(value)


def page_with(page: str, text: str) -> str:
    """Put the section between the page's markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Measure, print, write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="folder or name of a model; default: smollm2")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")
    parser.add_argument("--size", choices=[*SIZES], default="full", help="default: full")
    parser.add_argument("--only", nargs="+", choices=[*MEASURES], default=[*MEASURES], help="what to measure")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and write nothing")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU is at hand: nothing was measured, and {PAGE.name} is as it was", file=sys.stderr)
        return NO_GPU
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    setup = Setup(options.model, options.device, SIZES[options.size])
    with tempfile.TemporaryDirectory() as folder:
        found = measure(setup, Path(folder), options.only)
    text = section(found, setup.size)
    if not options.json and options.device == "cuda" and options.size == "full":
        PAGE.write_text(page_with(PAGE.read_text(), text))
    print(json.dumps(found) if options.json else text)
    return 1 if found["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
