"""Parse the tool calls in an agent's answer.

::

    reader    the call format of a tokenizer's template, found by rendering a call and parsing it; with it, the calls,
              reasoning and text of a turn, from its token ids
    thoughts  the markers of reasoning of a template, or of known families
    families  the call formats of known families of templates
    described the format that a tokenizer's own ``response_template`` describes
    repairs   calls that miss the format but can be parsed without doubt
    forms     split an answer at markers, into messages with headers, or into calls written as Python
    schemas   check arguments against the JSON schema of a tool
    values    the values inside a call: JSON, or text whose type a schema defines
"""
