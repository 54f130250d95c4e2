"""The command ``agentsgym``.

::

    app         the entry point, with all commands
    commands/   one module per command
    options     options that several commands share, and what their values name
    console     output with and without color, and failures
    catalogue   the available environments
    tasks       the tasks to play
    players     from a name to an agent
    agent_runs  all episodes of one agent, with a progress bar
    results     the results of these episodes, as a table and as JSON
    display     an episode as it is played
    stores      rollout stores: episodes to write, rollouts to select

Only ``options`` and ``console`` are imported eagerly, so that ``agentsgym --help`` is fast.
"""
