"""Training runs from a configuration, in a file or as a dict.

::

    sections      YAML without duplicate keys, dataclasses whose fields are checked, and errors that name the key
    recipe        the configuration of a run, read from a file or from plain values
    environments  the environments of a recipe: their tasks, rows and players
    warm_start    demonstrations: episodes to play, or stored rollouts
    train         the training run
    run           TrainingRun: from the first evaluation to the files, for scripts that build their own trainer
    scripts       helpers for training scripts: progress bars, models, transcripts
    from_values   settings from plain values, and the options of a training script, parsed from a command line
"""
