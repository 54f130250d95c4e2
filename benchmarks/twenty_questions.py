"""Evaluate agents under the protocols of Twenty Questions, and record the results as rows of one file.

``python -m benchmarks.twenty_questions`` plays the scripted players; ``NAME=AGENT`` adds or replaces the rows of an
agent of ``agentsgym eval``, as in ``SmolLM2=policy:outputs/smollm2``. Rows of another fingerprint are removed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import record

RESULTS = Path(__file__).parent / "results"
PROTOCOLS = ("v1", "v1-hard", "v1-small")
PLAYERS = ("RandomPlayer=random", "GreedyPlayer=reference")


def evaluated(protocol: str, agent: str) -> dict[str, Any]:
    """Return what ``agentsgym eval`` prints for an agent under a protocol."""
    options = ("--agent", agent, "--no-references", "--json")
    command = [sys.executable, "-m", "agentsgym.cli.app", "eval", f"TwentyQuestions:{protocol}", *options]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def figures_of(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the estimates for the evaluated agent, with their intervals."""
    found = result["agents"][0]["results"]
    names = [name for name, value in found.items() if f"{name}_interval" in found and value is not None]
    parts = {name: (found[name], *found[f"{name}_interval"]) for name in names}
    return {name: dict(zip(("value", "low", "high"), part, strict=True)) for name, part in parts.items()}


def table(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the rows of the manual's table: protocol, agent, win rate and information in percent, and turns."""
    rows: list[str] = []
    for label in dict.fromkeys(name.partition(": ")[0] for name in figures):
        cells = label.split(", ", 1)
        for name, factor, digits in (("win_rate", 100, 0), ("info/information", 100, 0), ("mean_turns", 1, 1)):
            figure = {key: f"{bound * factor:.{digits}f}" for key, bound in figures[f"{label}: {name}"].items()}
            cells.append("{value} [{low}, {high}]".format(**figure))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    """Evaluate the agents, add their rows to the file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", nargs="*", metavar="NAME=AGENT", default=PLAYERS)
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=PROTOCOLS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    path, agents = options.results / "twenty_questions.json", dict(one.split("=", 1) for one in options.agents)
    rows: dict[str, Any] = {}
    for protocol in options.protocols:
        for name, agent in agents.items():
            result = evaluated(protocol, agent)
            behavior = {"play": result["fingerprint"]}
            kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if kept.get("fingerprint") != behavior:
                kept = {"figures": {}, "agents": {}}
            rows = kept["figures"] | {f"{protocol}, {name}: {key}": one for key, one in figures_of(result).items()}
            rows = {key: rows[key] for key in sorted(rows, key=lambda key: PROTOCOLS.index(key.split(",")[0]))}
            more: dict[str, Any] = {"agents": kept["agents"] | {name: agent}}
            record(options.results, path.stem, rows, [result["seed"]], behavior, **more)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
