"""A whole training run from one configuration, in a file or as a dict.

::

    yaml_text     YAML without keys that stand twice
    sections      dataclasses whose fields say what is valid, and errors that know their place
    recipe        what a run is made of, read from a file or from plain values
    environments  the environments of a recipe: their tasks, rows and players
    paths         the folders of a run, checked first
    warm_start    what is imitated first: episodes that are played, or stored rollouts
    train         the run itself
    run           TrainingRun: from the first evaluation to the files, for scripts that build their own trainer
    scripts       what training scripts share: arguments, models, summaries
    command_line  overrides from a command line
    from_values   settings from plain values
"""
