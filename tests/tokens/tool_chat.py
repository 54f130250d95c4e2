"""Conversations with tools, and templates that no library ships: what the tests of tool conversations share."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from chat_families import TRL_TEMPLATES, tokenizer_for

from agentsgym.tokens.transcript import ChatFormat, Transcript
from agentsgym.types import Action, Message, ToolCall

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name}.",
            "parameters": {
                "type": "object",
                "properties": {"where": {"type": "string", "description": "A place."}},
                "required": ["where"],
            },
        },
    }
    for name in ("look", "walk", "search_all")
]
GO: Message = {"role": "user", "content": "go"}

_PLAIN = (
    "{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% elif m.role == 'system' %}<|sys|>{{ m.content }}<|end|>"
)
_SCHEMAS = "{% if tools %}<|sys|>{% for t in tools %}{{ t.function | tojson }}\n{% endfor %}<|end|>{% endif %}"
_ASK = "{% if add_generation_prompt %}<|model|>{% endif %}"
OWN_TEMPLATES = {
    "ids of nine letters": (
        _SCHEMAS + "{% for m in messages %}" + _PLAIN + "{% elif m.role == 'tool' %}"
        "{% if m.tool_call_id is undefined or m.tool_call_id | length != 9 %}"
        "{{ raise_exception('nine, please') }}{% endif %}"
        '[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
        "{% elif m.tool_calls %}<|model|>[TOOL_CALLS][{% for c in m.tool_calls %}"
        "{% if c.id | length != 9 %}{{ raise_exception('nine, please') }}{% endif %}"
        '{{ c.function | tojson }} # {{ c.id }}{{ ", " if not loop.last }}{% endfor %}]</s>'
        "{% else %}<|model|>{{ m.content }}</s>{% endif %}{% endfor %}" + _ASK
    ),
    "results inside the turn": (
        _SCHEMAS + "{% set ns = namespace(inside=false, names=[]) %}{% for m in messages %}{% if m.role == 'tool' %}"
        "<|run|>{{ m.name }} says {{ m.content }}<|ran|>{% set ns.inside = true %}{% elif m.role == 'assistant' %}"
        "{{ '<|model|>' if not ns.inside }}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<|call|>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
        "{% set ns.inside = false %}{% if m.tool_calls %}{{ '<|run|>' if loop.last }}{% else %}<|end|>{% endif %}"
        "{% else %}{% set ns.inside = false %}<|user|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt and not ns.inside %}<|model|>{% endif %}"
    ),
    "schemas in the first user message": (
        "{% for m in messages %}{% if m.role == 'tool' %}<|tool|>\n{{ m.content | trim }}<|end|>\n"
        "{% elif m.role == 'assistant' %}<|model|>\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}"
        "</tool_call>{% endfor %}<|end|>\n{% else %}<|{{ m.role }}|>\n"
        "{% if tools and m.role == 'user' and loop.first %}{{ tools | tojson }}\n\n{% endif %}"
        "{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|model|>\n{% endif %}"
    ),
}
# Numbers each result by the position of its call in the whole conversation.
NUMBERED = OWN_TEMPLATES["schemas in the first user message"].replace(
    "<|tool|>\n",
    "{% set ns = namespace(n=0, found=-1) %}{% for one in messages %}{% for c in one.tool_calls or [] %}"
    "{% if c.id == m.tool_call_id %}{% set ns.found = ns.n %}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{% endfor %}<|tool|>\n[{{ ns.found }}] ",
)
MOVES_SCHEMAS = (
    "{% for m in messages %}"
    + _PLAIN.replace("<|user|>", "{{ tools | tojson if tools and loop.last }}<|user|>")
    + "{% else %}<|model|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    + _ASK
)


@cache
def tool_family(name: str) -> Any:
    """The tokenizer of a template of TRL or of one of those here."""
    return tokenizer_for({**OWN_TEMPLATES, **TRL_TEMPLATES}[name])


def tool_render(name: str, messages: Sequence[Any], *, tokenize: bool = True, **options: Any) -> Any:
    """What the tokenizer itself makes of a whole conversation with tools."""
    form: Any = {"return_dict": False} if tokenize else {}
    # transformers does this itself from 5.21 on
    named = [{"thinking": m["reasoning_content"], **m} if "reasoning_content" in m else m for m in messages]
    return tool_family(name).apply_chat_template(
        named, tools=TOOLS, tokenize=tokenize, add_generation_prompt=True, **form, **options
    )


def new_transcript(name: str, **options: Any) -> Transcript:
    """A conversation that has begun."""
    transcript = Transcript(ChatFormat.of(tool_family(name), tools=TOOLS, **options))
    transcript.observe([GO])
    return transcript


def calls_of(*arguments: Any, first: int = 0) -> list[ToolCall]:
    """A call for each argument, of one tool after the other."""
    return [
        ToolCall(name=TOOLS[n % 3]["function"]["name"], arguments={"where": value})
        for n, value in enumerate(arguments, first)
    ]


def results_of(*contents: str) -> list[Message]:
    return [{"role": "tool", "content": content} for content in contents]


def one_round(
    transcript: Transcript, arguments: Sequence[Any], results: Sequence[str], **output: Any
) -> tuple[int, int]:
    """Call a tool for each argument, and be given the results."""
    span = transcript.act(Action(text=output.pop("text", ""), tool_calls=calls_of(*arguments), **output))
    transcript.observe(results_of(*results))
    return span
