"""Train against a league: frozen copies of the policy and fixed players, each with a rating."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from safetensors.torch import load_model, save_model  # pyright: ignore[reportUnknownVariableType]

from agentsgym.agents.base import Agent, as_agent
from agentsgym.agents.policy.agent import PolicyAgent
from agentsgym.agents.trained import DEFAULT_TURN_TOKENS
from agentsgym.errors import ConfigError, import_extra
from agentsgym.fields import check_choice, is_dict, is_int, or_none, require
from agentsgym.ranks import all_gather_objects
from agentsgym.seeding import derive_seed
from agentsgym.tokens.transcript import ChatFormat
from agentsgym.training.observing import BatchObserver, ObservedBatch
from agentsgym.types import Action

if TYPE_CHECKING:
    from agentsgym.errors import AgentError
    from agentsgym.types import Message, TurnRequest

DRAWS: Final = ("prioritized", "uniform")
_FILE: Final = "league.json"
_SEAT: Final = "/player "  # behind the session in the id of an opponent's conversation
_RESULTS: Final = ("won", "drawn", "lost")


@dataclass(slots=True)
class Member:
    """A player of the league.

    Attributes:
        agent: The agent that plays.
        rating: Its rating, with ``mu`` and ``sigma``.
        is_snapshot: Whether it is a copy of the policy.
        results: How many games the policy in training won, drew and lost against it.
    """

    agent: Agent
    rating: Any
    is_snapshot: bool
    results: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_RESULTS, 0))

    @property
    def score(self) -> float:
        """The policy's mean score against it, 1 for a win and 1/2 for a draw, with a win and a loss added."""
        won, drawn, lost = (self.results[name] for name in _RESULTS)
        return (won + 1 + drawn / 2) / (won + drawn + lost + 2)


class League(Agent, BatchObserver):
    """The opponent of a policy in training: in each episode, one of several frozen players.

    Pass it to the environment as ``opponent`` and to the trainer in ``callbacks``. The player is drawn by the seed of
    the episode, so that all rollouts of a task have the same opponent. Copies of the policy are added while training,
    and saved in checkpoints. A player wins if the policy's final reward is negative, and loses if it is positive.

    Ratings are those of Weng & Lin 2011 (the Plackett-Luce model of the package ``openskill``): a mean μ, 25 at first,
    with an uncertainty σ. A copy starts with the rating of the policy.

    Attributes:
        members: The players by name; copies are named ``"step N"``.
        rating: The rating of the policy in training, which is logged with the next batch.
    """

    def __init__(  # noqa: PLR0913  # keywords, most of them left out
        self,
        players: Mapping[str, Agent] | None = None,
        *,
        snapshot_steps: int = 50,
        max_snapshots: int = 8,
        draw: str = "prioritized",
        history: Callable[[list[Message]], list[Message]] | None = None,
        max_turn_tokens: int = DEFAULT_TURN_TOKENS,
        seed: int = 0,
    ) -> None:
        """Set up the league; copies of the policy are added when training begins.

        Args:
            players: Fixed players, by name.
            snapshot_steps: Number of optimizer steps between copies of the policy; the first is that before training.
            max_snapshots: Maximum number of copies. Of more, the one that the policy beats most often is dropped, but
                not the newest.
            draw: ``"uniform"``, or ``"prioritized"`` to draw a player in proportion to 1 minus the policy's score
                against it (prioritized fictitious self-play, Vinyals et al. 2019).
            history: The function in ``env_config["history"]`` if there is one, so that copies see what the policy sees.
            max_turn_tokens: Token budget of a turn of a copy.
            seed: Seed of the draws.

        Raises:
            MissingDependencyError: The package ``openskill`` is not installed.
            ConfigError: A value is invalid.
        """
        require("League(players)", players, or_none(is_dict), "a dict of agents by name, or None")
        require("snapshot_steps", snapshot_steps, is_int(1), "a positive int")
        require("max_snapshots", max_snapshots, is_int(1), "a positive int")
        check_choice("draw", draw, DRAWS)
        self._model = import_extra("openskill.models", "league").PlackettLuce()
        self.members = {
            name: Member(as_agent(agent), self._model.rating(), is_snapshot=False)
            for name, agent in (players or {}).items()
        }
        self.rating: Any = self._model.rating()
        self._snapshot_steps, self._max_snapshots = snapshot_steps, max_snapshots
        self._is_prioritized, self._history, self._seed = draw == "prioritized", history, seed
        self._max_turn_tokens = max_turn_tokens
        self._opponents: dict[str, str] = {}  # the player's name by session, until the result is known

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action | AgentError]:
        """Answer each request as the player that was drawn for its session."""
        answers: list[Action | AgentError] = []
        for request in requests:
            name, state = request.agent_state or (self._draw(request), None)
            member = self.members[name]
            own = replace(request, agent_state=state)
            [action] = member.agent.act([self._as_seen(own, member.agent) if member.is_snapshot else own])
            is_answered = isinstance(action, Action)
            answers.append(replace(action, agent_state=(name, action.agent_state)) if is_answered else action)
        return answers

    def _draw(self, request: TurnRequest) -> str:
        if not self.members:
            raise ConfigError("the league has no players: pass it to the trainer in callbacks, or give it players")
        stream = random.Random(derive_seed("league", self._seed, request.seed))
        weights = [1 - one.score if self._is_prioritized else 1.0 for one in self.members.values()]
        [name] = stream.choices([*self.members], weights)
        self._opponents[request.session_id.partition(_SEAT)[0]] = name
        return name

    def _as_seen(self, request: TurnRequest, agent: Any) -> TurnRequest:
        """Show a copy what the policy in training sees."""
        if self._history is None:
            return request
        messages = self._history([*request.messages])
        return replace(request, messages=messages, token_ids=ChatFormat.of(agent.tokenizer).render(messages))

    def on_batch(self, observed: ObservedBatch) -> None:
        """Collective: rate the policy and its opponents by the results of a batch."""
        opponents, self._opponents = self._opponents, {}
        if not observed.phase.is_training:
            return
        results = [
            (opponents[one.session_id], _RESULTS[1 - (one.final_reward > 0) + (one.final_reward < 0)])
            for one in observed.batch.trajectories
            if not one.failed and one.session_id in opponents
        ]
        for name, result in all_gather_objects(results):
            self.record(name, result)
        self.metrics = {"league/rating": self.rating.mu, "league/uncertainty": self.rating.sigma}

    def record(self, name: str, result: str) -> None:
        """Record that the policy in training won, drew or lost against a player: ``"won"``, ``"drawn"``, ``"lost"``."""
        member = self.members[name]
        member.results[result] += 1
        place = _RESULTS.index(result)
        [[self.rating], [member.rating]] = self._model.rate(
            [[self.rating], [member.rating]], ranks=[1 + (place > 1), 1 + (place < 1)]
        )

    def table(self) -> list[dict[str, Any]]:
        """Return the policy and the players from the highest rating to the lowest, each with its results.

        Returns:
            Rows with ``name``, ``rating`` (μ), ``uncertainty`` (σ), and the numbers of games that the policy in
            training ``won``, ``drawn`` and ``lost`` against the player.
        """
        rows = [{"name": "policy", "rating": self.rating.mu, "uncertainty": self.rating.sigma}]
        rows += [
            {"name": name, "rating": one.rating.mu, "uncertainty": one.rating.sigma, **one.results}
            for name, one in self.members.items()
        ]
        return sorted(rows, key=lambda row: -row["rating"])

    def add_snapshot(self, model: Any, tokenizer: Any, name: str) -> None:
        """Add a frozen copy of the policy, with its rating.

        Raises:
            ConfigError: The weights are sharded.
        """
        if any(hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id") for tensor in model.parameters()):
            raise ConfigError("a league keeps copies of the whole policy, which sharded weights do not allow")
        frozen = copy.deepcopy(model).requires_grad_(requires_grad=False).eval()
        agent = PolicyAgent(frozen, tokenizer, seed=self._seed, max_turn_tokens=self._max_turn_tokens)
        self.members[name] = Member(agent, copy.deepcopy(self.rating), is_snapshot=True)
        snapshots = [name for name, one in self.members.items() if one.is_snapshot]
        if len(snapshots) > self._max_snapshots:
            beaten = max(snapshots[:-1], key=lambda one: self.members[one].score)
            del self.members[beaten]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add a copy of the policy, or load the league of the checkpoint.

        Raises:
            ConfigError: Rollouts are played ahead of training, where a copy could be dropped during its game.
        """
        if args.max_staleness:
            raise ConfigError(f"a league requires max_staleness=0, got {args.max_staleness}")
        if state.global_step:
            self._load(_folder(args, state), kwargs["model"], kwargs["processing_class"])
        else:
            self.add_snapshot(kwargs["model"], kwargs["processing_class"], "step 0")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add a copy of the policy every few steps."""
        if state.global_step % self._snapshot_steps == 0:
            self.add_snapshot(kwargs["model"], kwargs["processing_class"], f"step {state.global_step}")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the league into the checkpoint."""
        if not state.is_world_process_zero:
            return
        folder = _folder(args, state)
        folder.mkdir(parents=True, exist_ok=True)
        members = {
            name: {
                "mu": one.rating.mu,
                "sigma": one.rating.sigma,
                "results": one.results,
                "is_snapshot": one.is_snapshot,
            }
            for name, one in self.members.items()
        }
        for name, one in self.members.items():
            if one.is_snapshot:
                save_model(_model_of(one), str(folder / f"{name}.safetensors"))
        known = {"policy": {"mu": self.rating.mu, "sigma": self.rating.sigma}, "members": members}
        (folder / _FILE).write_text(json.dumps(known))

    def _load(self, folder: Path, model: Any, tokenizer: Any) -> None:
        path = folder / _FILE
        if not path.is_file():
            raise ConfigError(f"{path} is missing: a league cannot be resumed without its players")
        known = json.loads(path.read_text())
        own = {name for name, one in known["members"].items() if not one["is_snapshot"]}
        if missing := own - self.members.keys():
            raise ConfigError(f"the league in {folder} has the players {sorted(missing)}, which this league lacks")
        self.rating = self._model.rating(**known["policy"])
        for name, one in known["members"].items():
            if one["is_snapshot"]:
                self.add_snapshot(model, tokenizer, name)
                load_model(_model_of(self.members[name]), str(folder / f"{name}.safetensors"))
            self.members[name].rating = self._model.rating(mu=one["mu"], sigma=one["sigma"])
            self.members[name].results = dict(one["results"])

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a league plays in the process that trains: use env_pool=None or 'threads'")


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "league"


def _model_of(member: Member) -> Any:
    agent: Any = member.agent
    return agent.model
