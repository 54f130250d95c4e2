"""What ``benchmarks/faults.py`` does to a run: one module a kind of fault, each with ``run(quick)``."""
