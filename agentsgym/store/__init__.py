"""Keep finished rollouts on disk: append-only parquet files that any tool can read.

::

    Trajectory ─▶ StoredRollout ─▶ RolloutWriter ─▶ part-….parquet ─▶ RolloutStore ─▶ Trajectory
"""
