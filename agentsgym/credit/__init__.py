"""Assign credit: place rewards on turns and tokens, and estimate advantages.

For users of the library:

::

    advantages  the estimators and what they share; from estimates to tokens
    registry    find an estimator by name and bind its options; declare the traits of your own
    scored      the rollout as an estimator sees it
    ema         moving averages that an estimator of your own may keep

For the trainer, the environments and the viewer:

::

    rewards       place rewards on turns and tokens          outcomes, returns, gae   the estimators themselves
    role_rewards  assign the rewards of roles to turns       _comparison              baselines and scales for them
    seats         split rollouts by role                     shaping                  potential-based shaping
    assignment    from the rollouts of all ranks to tokens   bound, traits            an estimator with its options
    filters       which rollouts are trained on              weights                  weights of turns in the loss
    settings      the settings that decide advantages
"""
