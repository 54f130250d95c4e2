"""A whole training run from one configuration, in a file or as a dict.

::

    yaml_text   YAML without keys that stand twice
    sections    dataclasses whose fields say what is valid, and errors that know their place
    recipe      what a run is made of, read from a file or from plain values
    worlds      the environments of a recipe: their tasks, rows and players
    places      the folders of a run, checked first
    lessons     what is imitated first: games that are played, or stored rollouts
    train       the run itself
"""
