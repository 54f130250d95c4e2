"""The command ``agentsgym``.

::

    app         the entry point, with all commands
    commands/   one module per command
    options     options that several commands share, and what their values name
    console     output with and without color, and failures
    catalogue   the available environments
    players     from a name to an agent
    agent_runs  all episodes of one agent, and their results as a table and as JSON
    display     an episode as it is played
    stores      the tasks to play; rollout stores: episodes to write, rollouts to select

Only ``options`` and ``console`` are imported eagerly, so that ``agentsgym --help`` is fast.
"""
