"""The benchmark of what ranks send counts calls, bytes and reasons, here in a group of one process."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, pickle, tempfile, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import communication
store = dist.FileStore(tempfile.mkstemp()[1], 1)
dist.init_process_group("gloo", rank=0, world_size=1, store=store)
traffic, before = communication.Traffic(), dist.all_reduce
with traffic.counting():
    dist.all_reduce(torch.zeros(3))
    dist.all_gather_object([None], b"x" * 100)
    dist.barrier()
assert dist.all_reduce is before
[big, small] = traffic.rows(1)[:2]
kinds = [row["reason"].split(":")[0] for row in (big, small)]
print(kinds[0], big["bytes"], kinds[1], small["bytes"], sum(traffic.calls.values()))
dist.destroy_process_group()
rows = communication.beyond(communication.QUICK)
print([row["rollouts"] for row in rows], rows[1]["received_mb"] / rows[0]["received_mb"])
"""


def test_it_counts_what_is_sent_and_unpacks_what_more_ranks_would_send() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT / "benchmarks")], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counted, beyond = done.stdout.splitlines()[-2:]
    assert counted == f"object {len(pickle.dumps(b'x' * 100)) + 8} tensor 12 3"
    assert beyond.startswith("[16, 64] 4.")
