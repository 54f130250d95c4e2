"""What the page on exact tokens states of TRL's templates is so."""

import re
from pathlib import Path
from typing import Any

import pytest
from chat_families import TRL_TEMPLATES, family, full_render, text_of
from public_families import PUBLIC, public_family
from recorded_chat import user
from tool_chat import TOOLS, one_round, tool_family

from agentsgym import Action, TemplateError, ToolCall
from agentsgym.tokens.calls.forms import ChannelForm
from agentsgym.tokens.calls.reader import reader_of
from agentsgym.tokens.transcript import ChatFormat, Transcript

PAGE = (Path(__file__).parents[2] / "docs" / "exact_tokens.md").read_text(encoding="utf-8")


def table(header: str) -> list[list[str]]:
    """The rows of the table under a header row, cell by cell."""
    _, _, below = PAGE.partition(header)
    assert below
    lines = below.split("\n\n")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def named(cell: str, elsewhere: set[str]) -> list[str]:
    """The templates of a cell, with each one's training variant unless another row has it."""
    names = re.findall(r"`(\w+)`", cell)
    twins = [f"{name}_training" for name in names]
    return [*names, *(twin for twin in twins if twin in TRL_TEMPLATES and twin not in elsewhere)]


def takes(name: str, first: tuple[str, ...], later: tuple[str, ...]) -> bool:
    transcript = Transcript(ChatFormat.of(family(name)))
    try:
        transcript.observe([{"role": role, "content": "go"} for role in first])
        transcript.act(Action(text="left"))
        transcript.observe([{"role": role, "content": "on"} for role in later])
    except TemplateError:
        return False
    return True


def sampled(name: str, answer: str) -> Transcript:
    """The record of an answer that was sampled, and so keeps its white space."""
    chat_format = ChatFormat.of(family(name))
    transcript = Transcript(chat_format)
    transcript.observe([user("go")])
    ids = [*chat_format.encode(answer + chat_format.text_before_end), *chat_format.end_of_turn_ids]
    transcript.act(Action(text=answer, token_ids=ids))
    transcript.observe([user("on")])
    return transcript


SHAPES: list[Any] = [(("system", "user"), ("user",)), (("user",), ("system", "user")), (("user",), ("user", "user"))]
ROWS = table("| templates | system message first | system message later | two user messages in a row |\n")
TOOL_ROWS = table("| templates | tool schemas shown | format of calls | format of results |\n")
ANSWERS = {  # a plain answer, one with thinking, one in white space: is the record the full render?
    "as recorded": (True, True, True),
    "as recorded except for white space at their ends": (True, True, False),
    "as recorded without their thinking": (True, False, True),
    "as recorded without their thinking, except for white space at their ends": (True, False, False),
    "as recorded if they have thinking": (False, True, False),
    "in another way": (False, False, False),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_table_names_which_template_takes_what(row: list[str]) -> None:
    output = [{"yes": True, "no": False}[cell] for cell in row[1:]]
    for name in named(row[0], set()):
        assert [takes(name, *shape) for shape in SHAPES] == output, name


@pytest.mark.parametrize("row", TOOL_ROWS)
def test_the_table_shows_how_calls_and_results_are_recorded(row: list[str]) -> None:
    listed = set(re.findall(r"`(\w+)`", " ".join(cells[0] for cells in TOOL_ROWS)))
    for name in named(row[0], listed):
        tokenizer = tool_family(name)
        chat_format = ChatFormat.of(tokenizer, tools=TOOLS)
        with_tools, without = (Transcript(ChatFormat.of(tokenizer, tools=tools)) for tools in (TOOLS, ()))
        for transcript in (with_tools, without):
            transcript.observe([user("go")])
        shown = "yes" if with_tools.token_ids != without.token_ids else "no"
        calls = "its own form" if chat_format.prints_calls else "text"
        try:
            one_round(with_tools, ["a"], ["b"])
            results = "text" if "<tool_response>\nb\n" in text_of(tokenizer, with_tools.token_ids) else "its own form"
        except TemplateError:
            results = "refused"
        if results == "text" and chat_format.for_template(with_tools.messages)[-1]["role"] == "tool":
            results = "its own form"  # Qwen's is the text form
        assert [shown, calls, results] == row[1:], name


def test_the_tables_have_every_template() -> None:
    cells = [row[0] for row in TOOL_ROWS]
    listed = set(re.findall(r"`(\w+)`", " ".join(cells)))
    assert sorted(name for cell in cells for name in named(cell, listed)) == sorted(TRL_TEMPLATES)
    assert sorted(name for row in ROWS for name in named(row[0], set())) == sorted(TRL_TEMPLATES)
    cells = [row[1] for row in table("| how the template would render earlier answers | templates |\n")]
    listed = set(re.findall(r"`(\w+)`", " ".join(cells)))
    assert sorted(name for cell in cells for name in named(cell, listed)) == sorted(TRL_TEMPLATES)


@pytest.mark.parametrize("row", table("| how the template would render earlier answers | templates |\n"))
def test_the_table_names_what_a_full_render_does_to_answers(row: list[str]) -> None:
    listed = set(re.findall(r"`(\w+)`", PAGE.partition("| how the template would render earlier answers")[2]))
    for name in named(row[1], listed):
        found: list[bool] = []
        for answer in ("left", "<think>\nhm\n</think>\n\nleft", " left \n"):
            transcript = sampled(name, answer)
            found.append(transcript.token_ids == full_render(name, transcript.messages))
        assert tuple(found) == ANSWERS[row[0]], name


def output_under(name: str, action: Action) -> tuple[str, str]:
    """The generation prompt, and what is recorded of an answer to it."""
    tokenizer = family(name)
    transcript = Transcript(ChatFormat.of(tokenizer))
    transcript.observe([user("Six times seven?")])
    start = len(transcript.token_ids)
    transcript.act(action)
    return text_of(tokenizer, transcript.token_ids[:start]), text_of(tokenizer, transcript.token_ids[start:])


def test_a_plain_answer_is_recorded_inside_the_thought_that_a_template_opens() -> None:
    line = PAGE.partition("**Templates that open the thought themselves.**")[2].partition("ends with `<think>`")[0]
    listed = named(line, set())
    opening = {name: output_under(name, Action(text="42")) for name in TRL_TEMPLATES}
    assert {name for name, (prompt, _) in opening.items() if prompt.rstrip().endswith("<think>")} == {*listed}
    for name in listed:
        assert opening[name][1].startswith("42")  # no </think> before it
        thought, closed, output = output_under(name, Action(text="42", reasoning="Hm."))[1].partition("</think>")
        assert closed
        assert (thought.strip(), output.strip()[:2]) == ("Hm.", "42")
        assert "</think>" in output_under(name, Action(text="42", reasoning=""))[1]


FORMS_HEADER = (
    "| thoughts | calls | several calls in an answer | templates of TRL | other families |\n"
    "| --- | --- | --- | --- | --- |\n"
)


def form_of(name: str) -> tuple[str, str, str]:
    """How a family marks thoughts and calls, and whether an answer may have several calls."""
    tokenizer = public_family(name) if name in PUBLIC else tool_family(name)
    chat_format = ChatFormat.of(tokenizer, append=False, tools=TOOLS)
    reader, calls = reader_of(chat_format), [ToolCall(name="look", arguments={"where": "a"})] * 2
    opens = (
        (reader._markers or ("none",))[0].strip() if not isinstance(reader._thoughts, ChannelForm) else "<|channel|>"
    )
    if not chat_format.separates_calls:
        return f"`{opens}`" if opens != "none" else opens, "as text", "yes"
    transcript = Transcript(chat_format, "rerender")
    transcript.observe([user("go")])
    try:
        transcript.act(Action(text="", tool_calls=calls))
    except TemplateError:
        calls = []
    call = re.sub(r"abcdefghi.*|\{.*|look_up.*", "…", reader.example.split("\n")[0])
    call = "{…}" if call == "…" else call
    return f"`{opens}`" if opens != "none" else opens, f"`{call}`", "yes" if calls else "refused"


def forms_table() -> str:
    rows: dict[tuple[str, str, str], tuple[list[str], list[str]]] = {}
    for name in [*TRL_TEMPLATES, *PUBLIC]:
        if name.removesuffix("_training") in TRL_TEMPLATES and name.endswith("_training"):
            continue
        rows.setdefault(form_of(name), ([], []))[name in PUBLIC].append(name if name in PUBLIC else f"`{name}`")
    return "".join(
        f"| {' | '.join([*(one.replace('|', chr(92) + '|') for one in form), *map(', '.join, cells)])} |\n"
        for form, cells in sorted(rows.items())
    )


def test_the_table_of_forms_is_what_is_read() -> None:
    assert PAGE.partition(FORMS_HEADER)[2].split("\n\n")[0] + "\n" == forms_table()


if __name__ == "__main__":
    below = PAGE.partition(FORMS_HEADER)[2].split("\n\n", 1)[1]
    text = PAGE.partition(FORMS_HEADER)[0] + FORMS_HEADER + forms_table() + "\n" + below
    (Path(__file__).parents[2] / "docs" / "exact_tokens.md").write_text(text, encoding="utf-8")
