"""The benchmark of programs that learn: what its table is made of."""

from __future__ import annotations

from pathlib import Path

from benchmarks.credit_report import Run, keep
from benchmarks.program_learning import ratios


def test_ratios_are_of_medians_over_the_seeds_that_both_arms_have(tmp_path: Path) -> None:
    for arm, needed in (("grpo", 8), ("return_to_go", 4)):
        for seed in range(3):
            scores = [0.0] * needed + [1.0] * (10 - needed)
            keep(
                Run(
                    game="rounds_program",
                    arm=arm,
                    seed=seed,
                    batch_size=256,
                    random_score=0.0,
                    optimal_score=1.0,
                    scores=scores,
                    final_score=1.0,
                    final_win_rate=1.0,
                    num_evaluated=1,
                    cpu_s=0.0,
                ),
                tmp_path / "runs.jsonl",
            )
    table = ratios(tmp_path / "runs.jsonl")
    assert (
        f"| `return_to_go` | 3 | 3 | {4.8 * 256:,.0f} | {4.8 / 8.8:.2f} [{4.8 / 8.8:.2f}, {4.8 / 8.8:.2f}] |" in table
    )
