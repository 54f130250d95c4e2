"""Judges: agents that score turns, episodes or whole task groups by a rubric.

::

    rubric      the criteria, each of which becomes a named reward
    prompts     the request to a judge, in which everything that was judged is quoted
    verdicts    the answer of a judge, parsed and checked
    calls       the calls of a judge's agent: many at once, retried within bounds, and their tokens
    cache       answers on disk, by their requests
    judge       Judge: from rollouts to judgments
    scores      the scores of judgments as rewards of a rollout
    rollouts    judges the rollouts of a run in threads, while other episodes still play
"""
