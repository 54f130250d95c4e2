"""Assign credit: distribute rewards over turns and tokens, and estimate advantages.

For users of the library:

::

    advantages  the estimators and their shared rules; from estimates to tokens
    registry    find an estimator by name and bind its options; declare your own estimator's traits
    scored      a rollout as passed to an estimator
    ema         moving averages for your own estimators

For the trainer, the environments and the viewer:

::

    rewards       assign rewards to turns and tokens         outcomes, returns, gae   the estimators themselves
    components    named rewards, and the rewards of roles    _comparison              baselines and scales for them
    roles         split rollouts by role                     bound, traits            an estimator with its options
    assignment    which rollouts are trained on; from the    weights                  weights of turns in the loss
                  rollouts of all ranks to tokens            objectives               named rewards
    settings      the settings that determine advantages
"""
