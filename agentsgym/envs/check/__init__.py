"""Check an environment against the contract.

::

    run     check_env: the checks, their order and their time limit
    rules   checks of tasks, tools and recorded episodes, without playing
    plays   episodes, replays of the same actions (alone, concurrently, in a copy), and comparison of initial states
    probe   observation of the hooks while they run, and the report of the findings
"""
