"""Storage of finished rollouts on disk, in append-only parquet files that any tool can read.

::

    Trajectory ─▶ StoredRollout ─▶ RolloutWriter ─▶ part-….parquet ─▶ RolloutStore ─▶ Trajectory
"""
