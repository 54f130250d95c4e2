"""Scripted players: one that knows how each task was made, and one that tries commands at random."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentsgym.agents import scripted_player
from agentsgym.errors import AgentError
from agentsgym.types import TurnRequest

if TYPE_CHECKING:
    from agentsgym.envs.Terminal.env import TerminalEnv

_COMMANDS = (
    *("ls", "ls -R", "pwd", "find . -type f", "wc -l *", "cat {0}", "head {0}", "sort {0}", "file {0}", "cd {0}"),
    *(
        "cd ..",
        "ls {0} | wc -l > count.txt",
        "cp {0} {1}",
        "mv {0} {1}",
        "mkdir -p {0}",
        "grep {0} {1}",
        "chmod 755 {0}",
    ),
    *("tar -czf {0}.tar.gz .", "grep -r {0} . > answer.txt", "touch {0}", "python3 -m unittest", "sort {0} > {1}"),
)


@dataclass(slots=True, kw_only=True)
class Notes(scripted_player.Notes):
    """A player's memory of one episode.

    Attributes:
        commands: The commands that it still has to run.
        words: Names in the instruction.
    """

    commands: list[str] = field(default_factory=list[str])
    words: list[str] = field(default_factory=list[str])


class ReferencePlayer(scripted_player.ScriptedPlayer[Notes]):
    """Solves every task with the commands that the task was made with, which it reads from the environment's state."""

    def __init__(self, env: TerminalEnv, seed: int = 0) -> None:
        super().__init__(env, seed)
        self._states = env.active_states

    def _is_new_episode(self, request: TurnRequest) -> bool:
        notes: Notes = request.agent_state
        return not notes.commands  # it has submitted

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        state = self._states.get(request.session_id)
        if state is None:
            raise AgentError("the reference player reads the environment's state, so it cannot play in other processes")
        fenced = [f"```bash\n{command}\n```" if "\n" in command else command for command in state["task"].solution]
        return Notes(generator=generator, commands=[*fenced, "submit"])

    def _play(self, request: TurnRequest, notes: Notes) -> str:
        return notes.commands.pop(0)


class RandomPlayer(scripted_player.ScriptedPlayer[Notes]):
    """Runs plausible commands on names in the instruction, and submits after a while."""

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        text = request.messages[-1]["content"]
        return Notes(generator=generator, words=re.findall(r"[a-z][\w.-]*[a-z]", text))

    def _play(self, request: TurnRequest, notes: Notes) -> str:
        stream = notes.generator
        if stream.random() < 0.1 or notes.turn + 1 == self._num_turns:
            return "submit"
        return stream.choice(_COMMANDS).format(*stream.choices(notes.words, k=2))
