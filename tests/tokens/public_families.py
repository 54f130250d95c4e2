"""The forms of public families of models as facts, and small templates of our own that write in them.

A form is what a family writes around a thought and around calls; no template of another project is copied. TRL ships
templates of its own for further families.
"""

from functools import cache
from typing import Any, NamedTuple

from chat_families import tokenizer_for

_ARGUMENTS = "{{ c.function.arguments | tojson }}"
_PAIRS = "{% for k, v in c.function.arguments | items %}"
WRITTEN = {
    "kimi": "<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    f"<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|>{{% endfor %}}<|tool_calls_section_end|>",
    "command": "<|START_ACTION|>[\n{% for c in m.tool_calls %}"
    '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": '
    f"{_ARGUMENTS}}}{{{{ ',' if not loop.last }}}}\n{{% endfor %}}]<|END_ACTION|>",
    "minimax": '\n<minimax:tool_call>\n{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">\n'
    + _PAIRS
    + '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n'
    "{% endfor %}</minimax:tool_call>",
    "seed": "{% for c in m.tool_calls %}\n<seed:tool_call>\n<function={{ c.function.name }}>\n"
    + _PAIRS
    + "<parameter={{ k }}>{{ v if v is string else v | string }}</parameter>\n{% endfor %}</function>\n"
    "</seed:tool_call>{% endfor %}",
    "xml, inline": "{% for c in m.tool_calls %}<tool_call><function={{ c.function.name }}>"
    + _PAIRS
    + "<parameter={{ k }}>{{ v if v is string else v | tojson }}</parameter>{% endfor %}</function></tool_call>"
    "{% endfor %}",
    "dsml": "\n<\uff5cDSML\uff5cfunction_calls>\n{% for c in m.tool_calls %}"
    '<\uff5cDSML\uff5cinvoke name="{{ c.function.name }}">\n'
    + _PAIRS
    + "<\uff5cDSML\uff5cparameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
    "{{ v if v is string else v | tojson }}</\uff5cDSML\uff5cparameter>\n{% endfor %}</\uff5cDSML\uff5cinvoke>\n"
    "{% endfor %}</\uff5cDSML\uff5cfunction_calls>",
    "llama 4": "<|python_start|>[{% for c in m.tool_calls %}{{ c.function.name }}("
    + _PAIRS
    + "{{ k }}={{ v | tojson if v is not string else '\"' ~ v ~ '\"' }}{{ ', ' if not loop.last }}{% endfor %})"
    "{{ ', ' if not loop.last }}{% endfor %}]<|python_end|>",
}
_OBJECT = f'{{"name": "{{{{ c.function.name }}}}", "arguments": {_ARGUMENTS}}}'
_EACH = "{% for c in m.tool_calls %}"
_SEP = "\uff5ctool\u2581"
CALLS: dict[str, str] = WRITTEN | {
    "hermes": f"{_EACH}\n<tool_call>\n{_OBJECT}\n</tool_call>{{% endfor %}}",
    "nemotron": f"<TOOLCALL>[{_EACH}{_OBJECT}{{{{ ', ' if not loop.last }}}}{{% endfor %}}]</TOOLCALL>",
    "xml": f"{_EACH}\n<tool_call>\n<function={{{{ c.function.name }}}}>\n{_PAIRS}<parameter={{{{ k }}}}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    "glm": f"{_EACH}\n<tool_call>{{{{ c.function.name }}}}\n{_PAIRS}<arg_key>{{{{ k }}}}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "lfm": f"<|tool_call_start|>[{_EACH}{{{{ c.function.name }}}}({_PAIRS}{{{{ k }}}}={{{{ v | tojson }}}}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>",
    "mistral": f"[TOOL_CALLS][{_EACH}{_OBJECT}{{{{ ', ' if not loop.last }}}}{{% endfor %}}]",
    "mistral, named": f"{_EACH}[TOOL_CALLS]{{{{ c.function.name }}}}[ARGS]{_ARGUMENTS}{{% endfor %}}",
    "deepseek": f"<{_SEP}calls\u2581begin\uff5c>{_EACH}<{_SEP}call\u2581begin\uff5c>{{{{ c.function.name }}}}"
    f"<{_SEP}sep\uff5c>{_ARGUMENTS}<{_SEP}call\u2581end\uff5c>{{% endfor %}}<{_SEP}calls\u2581end\uff5c>",
    "dsml, v4": WRITTEN["dsml"].replace("function_calls", "tool_calls"),
}


class Family(NamedTuple):
    """What a family writes.

    Attributes:
        thought: What stands before and behind a thought; None if it writes none.
        calls: The form of its calls; None if its template prints none.
        is_begun: Whether the generation prompt begins a thought.
        native: Markers of calls that its template does not print.
        end: What ends a turn.
    """

    thought: tuple[str, str] | None
    calls: str | None
    is_begun: bool = False
    native: str = ""
    end: str = "<|im_end|>\n"


_THINK, _LINES = ("<think>", "</think>"), ("<think>\n", "\n</think>\n\n")
PUBLIC = {
    "Apertus": Family(("<|inner_prefix|>", "<|inner_suffix|>"), None),
    "Command A": Family(None, "command"),
    "Command A Reasoning": Family(("<|START_THINKING|>", "<|END_THINKING|>"), "command"),
    "DeepSeek R1": Family(("<think>\n", "\n</think>\n\n"), None, is_begun=True),
    "DeepSeek V3.1": Family(_THINK, "deepseek"),
    "DeepSeek V3.2": Family(_THINK, "dsml"),
    "DeepSeek V4": Family(_THINK, "dsml, v4"),
    "EXAONE 4": Family(_LINES, "hermes"),
    "EXAONE Deep": Family(("<thought>\n", "\n</thought>\n\n"), None),
    "Falcon H1": Family(None, "hermes"),
    "GLM 4.7": Family(_THINK, "glm"),
    "Granite 3": Family(None, None, native="<|tool_call|>"),
    "Granite 4": Family(None, "hermes"),
    "Hermes 4": Family(("<think>\n", "\n</think>\n"), "hermes"),
    "Kimi K2": Family(None, "kimi"),
    "Kimi K2 Thinking": Family(_THINK, "kimi"),
    "Kimi-VL Thinking": Family(("\u25c1think\u25b7", "\u25c1/think\u25b7"), None),
    "LFM2": Family(None, None, native="<|tool_call_start|><|tool_call_end|>"),
    "LFM2.5 Thinking": Family(_THINK, "lfm"),
    "Ling 2": Family(_LINES, "hermes"),
    "Llama 4": Family(None, "llama 4"),
    "Magistral": Family(("[THINK]", "[/THINK]"), "mistral, named", end="</s>"),
    "MiMo": Family(("<think>\n", "\n</think>\n"), "hermes"),
    "MiniMax M2": Family(_LINES, "minimax", is_begun=True),
    "Mistral Nemo": Family(None, "mistral", end="</s>"),
    "Nemotron Nano 2": Family(_LINES, "nemotron"),
    "OLMo 3 Think": Family(_THINK, None, is_begun=True),
    "Phi 4 mini": Family(None, None, native="<|tool_call|><|/tool_call|>"),
    "Phi 4 reasoning": Family(_THINK, None),
    "Qwen3 Coder": Family(None, "xml"),
    "QwQ": Family(_LINES, "hermes", is_begun=True),
    "Seed-OSS": Family(("<seed:think>", "</seed:think>"), "seed"),
    "SmolLM3": Family(("<think>\n", "\n</think>\n"), "hermes"),
    "Step 3.5": Family(("<think>\n", "\n</think>\n"), "xml", is_begun=True),
}
_TURNS = (
    "{{% if tools %}}<|im_start|>system\n{{{{ tools | tojson }}}}<|im_end|>\n{{% endif %}}"
    "{{% for m in messages %}}{{% if m.role == 'tool' %}}<|im_start|>tool\n{result}<|im_end|>\n{{% else %}}"
    "<|im_start|>{{{{ m.role }}}}\n{thought}{{{{ m.content }}}}{{% if m.tool_calls %}}{calls}{{% endif %}}{end}"
    "{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{begun}{{% endif %}}"
)
_RESULTS = {"kimi": "## Return of {{ m.tool_call_id }}\n{{ m.content }}"}
_SPECIAL = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[THINK]",
    "[/THINK]",
    "<seed:think>",
    "</seed:think>",
)


def template_of(one: Family) -> str:
    """A small template that writes in the form of a family."""
    opens, closes = one.thought or ("", "")
    thought = ""
    if one.thought is not None:
        thought = f"{{% if m.reasoning_content is defined %}}{opens}{{{{ m.reasoning_content }}}}{closes}{{% endif %}}"
    return _TURNS.format(
        thought=thought,
        calls=CALLS[one.calls] if one.calls else "",
        result=_RESULTS.get(one.calls or "", "{{ m.content }}"),
        begun=opens if one.is_begun else "",
        end=one.end,
    )


@cache
def public_family(name: str) -> Any:
    """A small tokenizer with the form of a family, each marker of which is a token."""
    one = PUBLIC[name]
    template = template_of(one)
    opens, closes = one.thought or ("", "")
    marks = [*filter(None, (opens.strip(), closes.strip())), *(mark for mark in _SPECIAL if mark in template)]
    tokenizer = tokenizer_for(template + one.native)
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokenizer.all_special_tokens, *dict.fromkeys(marks)]})
    tokenizer.chat_template = template
    return tokenizer
