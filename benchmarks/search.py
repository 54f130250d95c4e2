"""Measure search over a corpus made from a seed: indexing, opening the kept index, and a query."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from agentsgym.envs.Search import corpus as corpus_module
from agentsgym.envs.Search.corpus import BM25Index, IndexOptions, Passage, open_index
from agentsgym.envs.Search.env import SearchEnv
from agentsgym.seeding import derive_seed

_WORDS_PER_PASSAGE = 100
_VOCABULARY = 50_000


def corpus(num_passages: int) -> list[Passage]:
    """Make passages of a hundred words, whose frequencies fall as 1 / rank, as those of a language do."""
    generator = random.Random(derive_seed("search benchmark", num_passages))
    words = [f"w{rank}" for rank in range(_VOCABULARY)]
    weights = [1 / (rank + 1) for rank in range(_VOCABULARY)]
    drawn = generator.choices(words, weights, k=num_passages * _WORDS_PER_PASSAGE)
    texts = (drawn[start : start + _WORDS_PER_PASSAGE] for start in range(0, len(drawn), _WORDS_PER_PASSAGE))
    return [Passage(f"p{number}", " ".join(text)) for number, text in enumerate(texts)]


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Wall seconds of one call, and what it returned."""
    start = time.perf_counter()
    value = call()
    return time.perf_counter() - start, value


def query_seconds(index: BM25Index, passages: list[Passage], num_queries: int) -> list[float]:
    """Wall seconds of queries of five words of a passage each."""
    generator = random.Random(derive_seed("search queries"))
    queries = [" ".join(generator.sample(generator.choice(passages).text.split(), 5)) for _ in range(num_queries)]
    return [seconds(lambda query=query: index(query, 3))[0] for query in queries]


def measure(num_passages: int, num_queries: int) -> dict[str, float | int]:
    """Index, open the kept index, and search it."""
    passages = corpus(num_passages)
    with tempfile.TemporaryDirectory() as folder:
        index_s, _ = seconds(lambda: open_index(passages, IndexOptions(), folder))
        corpus_module._indexes.clear()  # pyright: ignore[reportPrivateUsage]  # as in another process
        open_s, index = seconds(lambda: open_index(passages, IndexOptions(), folder))
        times = query_seconds(index, passages, num_queries)
    return {
        "num_passages": num_passages,
        "index_s": round(index_s, 3),
        "open_kept_s": round(open_s, 3),
        "query_median_ms": round(1000 * statistics.median(times), 3),
        "query_worst_ms": round(1000 * max(times), 3),
        "generated_start_ms": round(1000 * seconds(lambda: SearchEnv(None, {"world": {"seed": 1}}))[0], 1),
    }


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_passages", type=int, default=100_000, help="passages (default: 100,000)")
    parser.add_argument("--num_queries", type=int, default=200, help="queries (default: 200)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = measure(options.num_passages, options.num_queries)
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name}: {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
