"""Read the calls of tools in an agent's answer.

::

    parse     a turn's calls, thoughts and text, out of its token ids
    reader    how a tokenizer's template writes calls, found by writing one and reading it back
    families  the forms of the known families of templates
    forms     an answer split at markers, or into messages with headers
    python    calls written as Python
    values    the values inside a call: JSON, typed text
"""
