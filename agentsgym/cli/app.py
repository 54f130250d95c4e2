"""The command line; ``agentsgym.cli.app:main`` is the script ``agentsgym``."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Generator, MutableMapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from agentsgym.cli.commands.check import check
from agentsgym.cli.commands.compare import compare
from agentsgym.cli.commands.envs import envs
from agentsgym.cli.commands.eval import evaluate
from agentsgym.cli.commands.export import export
from agentsgym.cli.commands.new import new
from agentsgym.cli.commands.play import play
from agentsgym.cli.commands.replay import replay
from agentsgym.cli.commands.serve import serve
from agentsgym.cli.commands.train import train
from agentsgym.cli.commands.view import view
from agentsgym.removed import REMOVED

# bash splits words at colons: `Arcade:Pon` reaches the command as three words.
_KIND, _WORDS, _INDEX = "_AGENTSGYM_COMPLETE", "COMP_WORDS", "COMP_CWORD"


class Commands(TyperGroup):
    """The commands; one that an earlier version had ends with what to use instead."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that ``args`` begin with."""
        sentence = REMOVED.get(f"agentsgym {args[0]}")
        if sentence is not None and not ctx.resilient_parsing:  # shell completion parses so
            typer.echo(f"error: {sentence}", err=True)
            raise typer.Exit(2)
        return super().resolve_command(ctx, args)


# Plain help is the same with and without color and in any width, and loads nothing but typer.
app = typer.Typer(
    name="agentsgym",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("envs", short_help="List the environments, or show one.")(envs)
app.command("check", short_help="Check an environment or stored rollouts for problems that would affect training.")(
    check
)
app.command("new", short_help="Create the files for a new environment.")(new)
app.command("eval", short_help="Evaluate agents: win rate, reward and turns, with confidence intervals.")(evaluate)
app.command("play", short_help="Play in the terminal, or watch an agent play.")(play)
app.command("export", short_help="Export stored rollouts in full, or as fine-tuning data.")(export)
app.command("replay", short_help="Replay stored rollouts and report any differences.")(replay)
app.command("compare", short_help="Compare two runs, task by task.")(compare)
app.command("view", short_help="View stored rollouts in the browser.")(view)
app.command("serve", short_help="Serve environments to other trainers over OpenEnv's protocol.")(serve)
app.command("train", short_help="Train a policy from a configuration file.")(train)


def _version(value: bool) -> None:
    if value:
        typer.echo(importlib.import_module("agentsgym").__version__)
        raise typer.Exit


@app.callback()
def agentsgym_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Environments, evaluation and training for multi-turn language-model agents.

    Exit codes: 0 for success, 1 for failure, 2 for invalid usage, 143 after SIGTERM.
    """


def joined_at_colons(words: Sequence[str], index: int) -> tuple[list[str], int, str]:
    """Join words that bash split at colons.

    Returns:
        The words as they were typed, the index of the word to complete, and the part of that word up to its last colon,
        which bash keeps separate; empty if there is none.

    >>> joined_at_colons(["agentsgym", "eval", "Arcade", ":", "Pon"], 4)
    (['agentsgym', 'eval', 'Arcade:Pon'], 2, 'Arcade:')
    """
    joined: list[str] = []
    held, is_after_colon = "", False
    for word in words[: index + 1]:
        is_colon = bool(word) and not word.strip(":")
        if joined and (is_colon or is_after_colon):
            held = joined[-1] + (word if is_colon else "")
            joined[-1] += word
        else:
            held = ""
            joined.append(word)
        is_after_colon = is_colon
    return [*joined, *words[index + 1 :]], max(0, len(joined) - 1), held


@contextlib.contextmanager
def whole_words(environment: MutableMapping[str, str] = os.environ) -> Generator[None]:
    """During completion in bash, pass joined words to the command, and print completions for bash's split words."""
    index = environment.get(_INDEX, "")
    if environment.get(_KIND) != "complete_bash" or not index.isdecimal():
        yield
        return
    words, place, held = joined_at_colons(environment.get(_WORDS, "").split("\n"), int(index))
    environment[_WORDS], environment[_INDEX] = "\n".join(words), str(place)
    offered = io.StringIO()
    try:
        with contextlib.redirect_stdout(offered):
            yield
    finally:
        for line in offered.getvalue().splitlines():
            print(line.removeprefix(held))


def main() -> None:
    """Run the command line."""
    with whole_words():
        app(prog_name="agentsgym")


if __name__ == "__main__":
    main()
