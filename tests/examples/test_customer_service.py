"""The example of customer service: its rules, its customers and their mistakes, and that a policy learns it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from example_runs import call_example, summary_of

from agentsgym import Action, Agent, AsyncAgent, ScriptedAgent, ToolCall, Trajectory, TurnRequest, check_env, evaluate

EXAMPLES = Path(__file__).parents[2] / "examples"
ORDER = {"number": 12, "item": "lamp", "status": "delivered", "days": 20}


@pytest.fixture(scope="module")
def shop() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        module: ModuleType = importlib.import_module("customer_service")
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


class Lines(Agent):
    """Speaks its lines and makes its calls, written as ``("find", 12)``, a turn each."""

    def __init__(self, *lines: Any) -> None:
        self.lines = lines

    def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
        return [self._speak(request) for request in requests]

    def _speak(self, request: TurnRequest) -> Action:
        turn = request.agent_state or 0
        line = self.lines[min(turn, len(self.lines) - 1)]
        if isinstance(line, str):
            return Action(text=line, agent_state=turn + 1)
        call = ToolCall(name=f"{line[0]}_order", arguments={"number": line[1]})
        return Action(text="", tool_calls=(call,), agent_state=turn + 1)


def serve(
    shop: Any, *lines: Any, wish: str = "return", customer: Any = None, config: Any = None, **order: Any
) -> Trajectory:
    env = shop.CustomerService(env_config=config, customer=customer)
    [played] = env.rollout([{"wish": wish, "order": {**ORDER, **order}, "seed": 0}], Lines(*lines))
    assert not played.failed, played.error
    return played


def test_the_rules_of_the_house(shop: Any) -> None:
    allowed = [
        (change, status, days)
        for change in ("cancel", "return")
        for status in shop.STATUSES
        for days in shop.DAYS
        if shop.is_allowed({"status": status, "days": days}, change)
    ]
    assert allowed == [
        *(("cancel", "processing", days) for days in shop.DAYS),
        *(("return", "delivered", d) for d in (5, 20)),
    ]


def test_good_service_is_rewarded_under_every_name(shop: Any) -> None:
    played = serve(shop, "Your number, please?", ("find", 12), ("return", 12), "Thank you, it is done.")
    assert played.success
    assert played.final_components == {"solved": 1.0, "rules": 0.0, "turns": pytest.approx(-0.08), "polite": 0.1}
    assert [message["content"] for message in played.messages if message["role"] == "tool"] == [
        "lamp, delivered 20 days ago",
        "ok",
    ]


@pytest.mark.parametrize(
    ("lines", "order", "solved", "rules"),
    [
        (("number, please", ("find", 12), "Sorry, we cannot do that."), {"days": 40}, True, 0.0),
        (("number, please", ("find", 12), "It is done, thank you."), {"days": 40}, False, 0.0),
        (("number, please", ("find", 12), ("return", 12), "It is done, thank you."), {"days": 40}, False, -0.5),
        (("number, please", ("return", 12), "It is done, thank you."), {}, False, -1.0),
        (("Sorry, we cannot do that.",), {"days": 40}, False, -0.5),
        (("number, please", ("find", 12), ("return", 12), "Sorry, not possible."), {}, False, 0.0),
        (("number, please", ("find", 12), ("cancel", 12), "It is done, thank you."), {}, False, -0.5),
        (("number, please", ("find", 13), ("find", 12), ("return", 12), "done, thank you"), {}, True, 0.0),
    ],
)
def test_what_is_solved_and_which_rules_are_broken(
    shop: Any, lines: tuple[Any, ...], order: dict[str, Any], solved: bool, rules: float
) -> None:
    played = serve(shop, *lines, **order)
    assert played.final_components is not None
    assert (played.success, played.final_components["rules"]) == (solved, rules)


def test_one_rude_answer_costs_the_reward_for_politeness(shop: Any) -> None:
    played = serve(shop, "Number?", ("find", 12), ("return", 12), "Done, thank you.")
    assert played.final_components is not None
    assert (played.success, played.final_components["polite"]) == (True, 0.0)


def test_a_customer_who_names_a_wrong_number_is_counted_and_names_the_right_one_next(shop: Any) -> None:
    env = shop.CustomerService(env_config={"customer_mistakes": 1.0})
    tasks = shop.draw_tasks(40, 0, "test")
    found = evaluate(env, shop.Clerk(env), tasks)
    assert found.win_rate is not None
    assert (found.win_rate.mean, found.metrics["customer_mistakes"].mean) == (1.0, 1.0)
    assert all(
        sum(one.messages[n]["role"] == "tool" for n in range(len(one.messages))) >= 2 for one in found.trajectories
    )


class Rewording(AsyncAgent):
    """A customer's model that repeats the line in capital letters, or loses its numbers."""

    def __init__(self, *, loses: bool) -> None:
        self.loses = loses

    async def aact(self, request: TurnRequest) -> Action:
        line = request.messages[0]["content"].split('"')[1].upper()
        return Action(text="".join(letter for letter in line if not letter.isdigit()) if self.loses else line)


@pytest.mark.parametrize("loses", [False, True])
def test_a_model_rewords_the_customer_and_its_mistakes_are_its_own(shop: Any, loses: bool) -> None:
    lines = ("number, please", ("find", 12), ("return", 12), "Done, thank you.")
    played = serve(shop, *lines, customer=Rewording(loses=loses))
    assert played.success
    assert played.info["customer_mistakes"] == loses
    assert ("IT IS 12." in played.messages[3]["content"]) != loses


class Speaking(AsyncAgent):
    """A customer without a script: speaks its lines, and keeps what it was given."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.requests = lines, list[list[Any]]()

    async def aact(self, request: TurnRequest) -> Action:
        self.requests.append([*request.messages])
        return Action(text=self.lines[len(self.requests) - 1])


FREE = {"customer_script": False}


def test_a_customer_without_a_script_knows_the_order_and_the_dialogue(shop: Any) -> None:
    customer = Speaking("My lamp is broken.", "Twelve, I mean 12.")
    lines = ("What is wrong with it?", "Your number, please?", ("find", 12), ("return", 12), "Done, thank you.")
    played = serve(shop, *lines, customer=customer, config=FREE)
    assert (played.success, played.info["customer_mistakes"]) == (True, 0)
    first, second = customer.requests
    assert "send back my lamp" in first[0]["content"]
    assert "12" in first[0]["content"]
    assert [(message["role"], message["content"]) for message in second[1:]] == [
        ("user", "What is wrong with it?"),
        ("assistant", "My lamp is broken."),
        ("user", "Your number, please?"),
    ]


@pytest.mark.parametrize(
    ("answer", "heard"),
    [
        ("It is 13.", "It is 13."),
        ("Why do you need it?", "Why do you need it?"),
        ("12 or 14?", "12 or 14?"),
        ("", "It is 12."),
    ],
)
def test_what_a_customer_without_a_script_gets_wrong_is_heard_and_counted(shop: Any, answer: str, heard: str) -> None:
    played = serve(shop, "number, please", "Sorry, we cannot do that.", customer=Speaking(answer), config=FREE)
    assert played.messages[3]["content"] == heard
    assert played.info["customer_mistakes"] == 1


def test_a_customer_without_a_script_must_be_an_agent(shop: Any) -> None:
    with pytest.raises(shop.ConfigError, match="needs a customer, an agent"):
        shop.CustomerService(env_config=FREE)


def test_a_judge_decides_what_is_polite_in_place_of_the_words(shop: Any) -> None:
    env = shop.CustomerService(env_config={"polite_reward": 0.0})
    env.judges = shop.polite_judge(ScriptedAgent(['{"reason": "Curt.", "polite": false}', '{"polite": true}']))
    lines = Lines("number, please", ("find", 12), ("return", 12), "Done, thank you.")
    played = env.rollout([{"wish": "return", "order": ORDER, "seed": 0}] * 2, lines)
    assert [(one.final_components or {})["polite"] for one in played] == [0.0, 0.0]
    assert played[0].info["judgments"][0]["reason"] == "Curt."


def test_tasks_are_drawn_evenly_and_never_twice_in_two_parts(shop: Any) -> None:
    train, held_out = (shop.draw_tasks(100, 0, part) for part in ("train", "evaluation"))
    assert sum(shop.is_allowed(task["order"], task["wish"]) for task in train) == 50
    assert not {task["seed"] for task in train} & {task["seed"] for task in held_out}


def test_the_environment_keeps_the_contract(shop: Any) -> None:
    env = shop.CustomerService(env_config={"customer_mistakes": 0.5})
    assert not check_env(env, shop.draw_tasks(4, 0, "check"), shop.Clerk(env, noise=0.4)).findings
    assert not check_env(env, shop.draw_tasks(2, 0, "check"), ScriptedAgent(["number?", "what", "done"])).findings


@pytest.mark.long
def test_the_tiny_policy_learns_it(tmp_path: Path) -> None:
    options = ["--num_tasks", "100", "--num_demonstrations", "2000", "--warm_start_steps", "800", "--max_steps", "120"]
    printed = call_example("customer_service", tmp_path, *options)
    summary = summary_of(tmp_path)
    assert summary["after"]["win_rate"] > summary["before"]["win_rate"] + 0.2
    assert "customer's mistakes" in printed
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_example_prints_its_rewards_by_name(tmp_path: Path) -> None:
    options = ["--num_tasks", "12", "--num_demonstrations", "40", "--warm_start_steps", "4", "--num_train_tasks", "40"]
    printed = call_example("customer_service", tmp_path, *options, "--max_steps", "2")
    table = printed[printed.rindex("solved") :].splitlines()
    assert [line.split("  ")[0] for line in table[1:]] == ["random", "by the rules", "before", "after"]
