"""Whole episodes with tools under real chat templates: what is recorded is what the template prints, ids are kept."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from chat_families import PRINTS_CALLS, TRL_TEMPLATES, tokenizer_for
from packaged import add
from test_tool_calls import ONE_CALL_A_TURN
from test_tool_conversations import EXACT, THINKING
from tool_chat import tool_family
from tool_functions import Calls, call

from agentsgym import Action, Agent, ConfigError, TemplateError, Trajectory, TurnRequest
from agentsgym.agents.answers import stop_token_ids
from agentsgym.envs import PriceListEnv, SearchEnv, ToolEnv
from agentsgym.envs.PriceList import ReferencePlayer as Shopper
from agentsgym.envs.Search import ReferencePlayer as Searcher

WORLD = {"num_people": 8, "num_firms": 3, "num_towns": 3, "num_rivers": 2, "num_seas": 2}
SUMS = [{"question": "What is 3 + 4?", "answer": 7}, {"question": "What is 3 + 4 again?", "answer": "7"}]
# Their calls stand in no form that can be read back, and environments with tools refuse them: see test_tool_calls.
UNREADABLE = ("results inside the turn", "schemas in the first user message")
PLAYABLE = [name for name in EXACT if name not in UNREADABLE]
_PLAYED: dict[tuple[str, str], tuple[Any, list[dict[str, Any]], list[Trajectory]]] = {}


def canonical(kind: str, name: str) -> tuple[Any, list[dict[str, Any]], list[Trajectory]]:
    """The reference player's episodes under a template: environment, tasks, records."""
    if (kind, name) not in _PLAYED:
        tokenizer = tool_family(name)
        if kind == "ToolEnv":
            env: Any = ToolEnv(tokenizer, tools=[add])
            tasks, player = SUMS, Calls([call("add", a=3, b=4)], [call("add", a=3, b="x")], "7")
        elif kind == "PriceList":
            env = PriceListEnv(
                tokenizer, {"kinds": ["price", "product"] if name.startswith(ONE_CALL_A_TURN) else ["sum", "product"]}
            )
            tasks, player = env.tasks(2), Shopper(env)
        else:
            env = SearchEnv(tokenizer, {"world": WORLD})
            rows = SearchEnv.get_train_dataset({"world": WORLD}, hops=[2], size=2)
            tasks, player = [row["task_data"] for row in rows], Searcher(env)
        _PLAYED[kind, name] = env, tasks, env.rollout(tasks, InForm(player, name))
    return _PLAYED[kind, name]


@pytest.mark.parametrize("thinks", [True, False])
def test_a_template_that_cannot_record_results_is_refused_as_the_environment_is_built(thinks: bool) -> None:
    template = TRL_TEMPLATES["deepseekv3"]
    tokenizer = tokenizer_for(template if thinks else template.replace("<think>\\n", ""))
    with pytest.raises(TemplateError, match=r"tool results differently in a second round of calls.*rerender"):
        ToolEnv(tokenizer, tools=[add])
    assert ToolEnv(tokenizer, {"history": "rerender"}, tools=[add]).chat_format is not None


def test_a_template_whose_calls_cannot_be_read_is_refused_as_the_environment_is_built() -> None:
    with pytest.raises(ConfigError, match="prints calls that cannot be read back"):
        ToolEnv(tool_family(UNREADABLE[0]), tools=[add])


class InForm(Agent):
    """Lets a player think where the template wants it: where the prompt begins a thought, before an answer."""

    def __init__(self, player: Agent, name: str) -> None:
        self._player, self._tokenizer, self._thinks = player, tool_family(name), name in THINKING

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Any]:
        """Answer each session."""
        return [self._output(*pair) for pair in zip(requests, self._player.act(requests), strict=True)]

    def _output(self, request: TurnRequest, action: Any) -> Action:
        begins = self._tokenizer.decode(list(request.token_ids)).rstrip().endswith("<think>")
        thinks = self._thinks if action.tool_calls else begins
        return replace(action, reasoning="I") if thinks else action


class Again(Agent):
    """Answers what was answered before, as sampled ids alone."""

    def __init__(self, tokenizer: Any, turns: Sequence[Sequence[Sequence[int]]]) -> None:
        self._tokenizer, self._turns, self._sessions = tokenizer, turns, count()

    def act(self, requests: Sequence[TurnRequest]) -> Sequence[Action]:
        """Answer each session."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: TurnRequest) -> Action:
        session, turn = request.agent_state or (next(self._sessions), 0)
        ids = self._turns[session][turn]
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return Action(text=text, token_ids=ids, logprobs=[-0.5] * len(ids), agent_state=(session, turn + 1))


def in_pieces(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Ids of the same text that no tokenizer would choose: one for each byte of what is no control token."""
    pieces: list[int] = []
    for one in ids:
        token = tokenizer.convert_ids_to_tokens(one)
        pieces += [one] if one in tokenizer.added_tokens_decoder else tokenizer.convert_tokens_to_ids([*token])
    return pieces


def turns_of(trajectory: Trajectory) -> list[list[int]]:
    return [list(trajectory.token_ids[turn.start : turn.stop]) for turn in trajectory.turns]


@pytest.mark.parametrize("kind", ["ToolEnv", "PriceList", "Search"])
@pytest.mark.parametrize("name", PLAYABLE)
def test_the_record_of_an_episode_is_the_templates_own_render(kind: str, name: str) -> None:
    env, _, trajectories = canonical(kind, name)
    tokenizer = tool_family(name)
    for trajectory in trajectories:
        assert (trajectory.error, trajectory.success) == (None, True)
        assert any(message["role"] == "tool" for message in trajectory.messages)
        last = trajectory.turns[-1]
        prompt = tokenizer.apply_chat_template(
            trajectory.messages[: last.message_index],
            tools=list(env.tool_schemas),
            add_generation_prompt=True,
            return_dict=False,
        )
        assert list(trajectory.token_ids[: last.start]) == prompt


@pytest.mark.parametrize("kind", ["ToolEnv", "PriceList", "Search"])
@pytest.mark.parametrize("name", [name for name in PLAYABLE if name in PRINTS_CALLS])
def test_sampled_calls_are_read_made_and_kept_bit_for_bit(kind: str, name: str) -> None:
    env, tasks, trajectories = canonical(kind, name)
    tokenizer = tool_family(name)
    sampled = [[in_pieces(tokenizer, turn) for turn in turns_of(one)] for one in trajectories]
    ends = stop_token_ids(SimpleNamespace(generation_config=None), tokenizer)  # type: ignore[arg-type]
    again = env.rollout(tasks, Again(tokenizer, sampled))
    for before, after, given in zip(trajectories, again, sampled, strict=True):
        assert (after.error, after.success, after.exact) == (None, True, True)
        assert after.turn_rewards == before.turn_rewards
        assert turns_of(after) == given
        assert [message["role"] for message in after.messages] == [message["role"] for message in before.messages]
        reported = [[m["content"] for m in one.messages if m["role"] != "assistant"] for one in (before, after)]
        assert reported[0] == reported[1]
        assert all(turn[-1] in ends for turn in given)
        assert any(len(turn) > len(own) for turn, own in zip(given, turns_of(before), strict=True))
        kept = [(own, turn) for own, turn in zip(turns_of(before), given, strict=True)]
        rebuilt = list(before.token_ids)
        for turn, (own, pieces) in zip(reversed(before.turns), reversed(kept), strict=True):
            assert rebuilt[turn.start : turn.stop] == own
            rebuilt[turn.start : turn.stop] = pieces
        assert list(after.token_ids) == rebuilt
