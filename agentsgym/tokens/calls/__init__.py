"""Parse the tool calls in an agent's answer.

::

    reader    the call format of a tokenizer's template, found by rendering a call and parsing it; with it, the calls,
              reasoning and text of a turn, from its token ids
    families  the call formats of known families of templates
    forms     split an answer at markers, into messages with headers, or into calls written as Python
    values    the values inside a call: JSON, or text whose type a schema defines
"""
