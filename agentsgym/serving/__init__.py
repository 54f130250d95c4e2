"""A server through which other trainers play environments, over OpenEnv's protocol.

::

    message ─▶ EpisodeServer ─▶ Session ─▶ ServedEnv.trial: the task that a reset selects
                                      └──▶ EpisodeByHand: its episode, step by step
"""
