"""Train a policy, by imitation of recorded trajectories and by policy gradients over many turns, both on TRL.

The only part of the library that imports ``trl``.
"""
