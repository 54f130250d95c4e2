"""Measure on a GPU: sampling over many turns, a training step, memory, bf16, and a policy that learns Twenty Questions.

    python -m benchmarks.gpu            # some minutes; prints, and writes the section of docs/benchmarks.md
    python -m benchmarks.gpu --json     # prints one JSON object, and writes nothing

Nothing is downloaded: models are built here, with random weights. Without a GPU it reports that, changes nothing, and
exits with status 3. ``--device cpu --size tiny`` runs the same code in a minute, to check that it works; its numbers
mean nothing and are never written.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
import trl

from benchmarks.credit_report import markdown_table
from benchmarks.gpu_measures import SIZES, Size, measure_gap, measure_learning, measure_sampling, measure_steps
from benchmarks.stock_trl import ANSWER_TOKENS

PAGE: Final = Path(__file__).parent.parent / "docs" / "benchmarks.md"
CURVE: Final = "gpu_learning_curve.png"
BEGIN, END = "<!-- gpu:begin -->", "<!-- gpu:end -->"
NO_GPU: Final = 3  # the exit status
LAST_START_S: Final = 420.0  # nothing begins later than this, so that all is over in ten minutes


def measure(size: Size, device: str, folder: Path) -> dict[str, Any]:
    """Take every measurement; one that fails or takes too long is reported, and the others follow.

    Args:
        size: How much is measured.
        device: ``"cuda"`` or ``"cpu"``.
        folder: For models and runs.
    """
    measurements: dict[str, Callable[[], Any]] = {
        "sampling": lambda: measure_sampling(size, device, folder / "model"),
        "gap": lambda: measure_gap(size, device),
        "steps": lambda: measure_steps(size, device, folder / "steps"),
        "learning": lambda: measure_learning(size, device, folder / "learning"),
    }
    begun = time.monotonic()
    found: dict[str, Any] = {"machine": machine(device), "left_out": {}}
    for name, take in measurements.items():
        if time.monotonic() - begun > LAST_START_S:
            found["left_out"][name] = f"{LAST_START_S:.0f} s were over"
            continue
        try:
            found[name] = take()
        except Exception as error:  # for example out of memory: the others are still useful
            logging.getLogger(__name__).exception("%s could not be measured", name)
            found["left_out"][name] = f"{type(error).__name__}: {error}"
    found["seconds"] = round(time.monotonic() - begun, 1)
    return found


def machine(device: str) -> dict[str, str]:
    """Name what was measured on."""
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    return {"device": name, **versions}


def section(found: Mapping[str, Any], size: Size) -> str:
    """Write what was found as a section of a page."""
    where = found["machine"]
    versions = ", ".join(f"{name} {where[name]}" for name in ("torch", "transformers", "trl"))
    parts = [f"On {where['device']} ({versions}), as `python -m benchmarks.gpu` saw it, in {found['seconds']:.0f} s."]
    writers: dict[str, Callable[[Any, Size], str]] = {
        "sampling": _sampling, "gap": _gap, "steps": _steps, "learning": _learning,
    }  # fmt: skip
    for name, write in writers.items():
        reason = found["left_out"].get(name)
        parts.append(f"Not measured: {name} ({reason})." if reason else write(found[name], size))
    return "\n\n".join(parts)


def _sampling(found: Mapping[str, Any], size: Size) -> str:
    rates = {"the model alone": found["model_alone"], "`PolicyAgent`": found["policy_agent"]}
    if found["vllm"] is not None:
        rates["vLLM"] = found["vllm"]
    rows = [[name, f"{rate:,.0f}", f"{rate / found['model_alone']:.2f}"] for name, rate in rates.items()]
    return (
        f"**Sampling**, {size.num_episodes} episodes of {size.num_turns} turns, {ANSWER_TOKENS} tokens a turn, a "
        f"random model of {found['parameters'] / 1e6:,.0f} million weights. The model alone runs as many tokens with a "
        f"cache, takes the likeliest, and plays no game.{_peak(found['peak_gb'])}"
        + ("" if found["vllm"] is not None else " vLLM is not installed.")
        + "\n\n"
        + markdown_table(["", "agent tokens a second", "of the model alone"], rows)
    )


def _gap(found: Mapping[str, float], _: Size) -> str:
    rows = [
        [name, *(f"{found[f'{name}_{key}']:.2g}" for key in ("mean", "largest", "kl"))]
        for name in ("float32", "bfloat16")
    ]
    header = ["precision", "mean", "largest", "KL (k3)"]
    return (
        "**Sampler and trainer**: the difference of a token's log-probability as it was sampled, turn by turn with a "
        f"cache, and in one pass over the trajectory.\n\n{markdown_table(header, rows)}"
    )


def _steps(found: Mapping[str, Mapping[str, Any]], size: Size) -> str:
    rows = [[name, f"{one['step_s']:.2f}", _number(one["peak_gb"])] for name, one in found.items()]
    return (
        f"**A training step**, rollouts included: {size.num_episodes} episodes of {size.num_train_turns} turns, the "
        "same model. By hand is `generate` on the whole history at each turn.\n\n"
        + markdown_table(["trainer", "step, s", "peak memory, GB"], rows)
    )


def _learning(found: Mapping[str, Any], size: Size) -> str:
    names = [name for name in ("random", "reference", "before", "after") if name in found]
    rates = ", ".join("{} {:.1%} [{:.1%}, {:.1%}]".format(name, *found[name]) for name in names)
    return (
        f"**Learning Twenty Questions**: a policy of {found['parameters'] / 1e6:,.1f} million weights, "
        f"{size.num_warm_steps:,} steps of imitation, {size.num_steps:,} of reinforcement learning, "
        f"{sum(found['seconds'].values()):,.0f} s in all. Games won: {rates}.\n\n![Its learning curve]({CURVE})"
    )


def _peak(gigabytes: float | None) -> str:
    return "" if gigabytes is None else f" Peak memory {gigabytes} GB."


def _number(value: float | None) -> str:
    return "" if value is None else str(value)


def page_with(page: str, text: str) -> str:
    """Put the section between the page's markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"


def main() -> int:
    """Measure, print, write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")
    parser.add_argument("--size", choices=[*SIZES], default="full", help="default: full")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and write nothing")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU is at hand: nothing was measured, and {PAGE.name} is as it was", file=sys.stderr)
        return NO_GPU
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    size = SIZES[options.size]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(size, options.device, Path(folder))
        curve = Path(folder) / "learning" / "learning_curve.png"
        is_written = not options.json and options.device == "cuda" and options.size == "full"
        if is_written:
            PAGE.write_text(page_with(PAGE.read_text(), section(found, size)))
            if curve.is_file():
                shutil.copyfile(curve, PAGE.parent / CURVE)
    print(json.dumps(found) if options.json else section(found, size))
    return 1 if found["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
