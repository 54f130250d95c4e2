"""Training a policy: imitation of recorded trajectories, and policy gradients over many turns, both on TRL.

The only part of the library that imports ``trl``.
"""
