"""Judges: agents that score turns, episodes or whole task groups by a rubric.

::

    rubric      the criteria, each of which becomes a named reward
    prompts     the request to a judge, in which everything that was judged is quoted; its answer, parsed and checked
    judge       Judge: from rollouts to judgments, as a hook for finished rollouts (agentsgym.envs.finished)
    scores      judgments, and their scores as rewards of a rollout
"""
