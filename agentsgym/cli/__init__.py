"""The command ``agentsgym``.

::

    app         the commands put together, and the entry point
    commands/   one module a command: its options, and what it does with the rest
    options     options that several commands have
    console     what is printed, in color and without, and how a command fails
    naming      which environment a name, a path or a file means
    catalogue   the environments that there are
    tasks       which tasks are played
    players     which agent a name means
    games       many games of one agent, with a progress bar
    results     what came of them, as tables and as JSON
    watching    a game as it is played
    selection   which rollouts of a store a command is about
    files       what the command ``new`` writes
    stores      rollout stores: where games are kept, and which rollouts of one are meant
    auditing    what the rollouts of a store must be like

Only ``options`` and ``console`` are imported at once, so that ``agentsgym --help`` is there at once too.
"""
