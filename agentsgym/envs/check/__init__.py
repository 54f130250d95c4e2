"""Check an environment against the contract.

::

    run         check_env: which checks there are, and in which order
    rules       tasks, tools and recorded episodes, checked without playing
    plays       episodes, and the same actions again: alone, among others, in a copy
    probe       reads, changes and results of the hooks while they run
    time_limit  the limit of time of a check
    report      the findings and how they are printed
"""
