"""Train a small language model to serve customers: tools, a database, rules of the house, and a simulated customer.

    python examples/customer_service.py                        # a built-in tiny policy, some minutes on a laptop CPU
    python examples/customer_service.py --model NAME_OR_PATH --max_turn_tokens 256
    python examples/customer_service.py --customer openai:NAME --judge openai:NAME

With ``--customer``, a model words the customer's lines, or writes its own with ``--free_customer``; with ``--judge``, a
model decides whether the clerk is polite.

A customer wants to cancel or to return an order. The policy has to ask for the order's number, look the order up,
change it if the rules allow that, and answer the customer. Four rewards are kept apart: ``solved``, ``rules``,
``turns`` and ``polite``. Customers make mistakes, too: ``info["customer_mistakes"]`` counts them, so that they are not
taken for failures of the policy. docs/customer-service.md explains the environment.

The script writes ``summary.json``, ``learning_curve.png``, transcripts and ``model/`` to ``outputs/customer_service``.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from datasets import Dataset

from agentsgym import (
    Action,
    AsyncAgent,
    ConfigError,
    Criterion,
    Judge,
    Message,
    OpenAIAgent,
    ToolCall,
    TrainingRun,
    TurnRequest,
    tiny_policy,
)
from agentsgym.agents import scripted_player
from agentsgym.envs.Tools import ToolEnv, ToolResult
from agentsgym.envs.Tools.env import TOOL_FIELDS
from agentsgym.fields import Field, is_bool, is_fraction, is_number
from agentsgym.recipes.from_values import PolicyOptions, parse_options
from agentsgym.recipes.scripts import load_policy, quiet_logging
from agentsgym.reports.tables import comparison_table
from agentsgym.seeding import derive_seed

ITEMS = ("lamp", "chair", "kettle", "radio")
NUMBERS = range(10, 30)
STATUSES = ("processing", "shipped", "delivered")
CHANGES = {"cancel": "canceled", "return": "returned"}  # what a change makes of the status
DAYS = (5, 20, 40, 60)
RETURN_DAYS = 30
WISHES = {"cancel": "I want to cancel my order of a {item}.", "return": "I want to send back my {item}."}
ASK, DONE, REFUSED = "What is the number, please?", "It is done. Thank you.", "Sorry, we cannot do that."
RUDE = ("What is the number?", "It is done.", "We cannot do that.")
RULES = (
    "You serve the customers of a shop. Ask for the order's number, look the order up first, and help if the rules "
    f"allow it. An order can be canceled while it is processing, and returned within {RETURN_DAYS} days of its "
    "delivery. Otherwise answer that you cannot do it. When you have changed an order, answer that it is done. Use "
    '"please", "thank you" or "sorry" in every answer.'
)

REWORD = 'You are a customer on the phone. Express in your own words, in one sentence: "{line}"'
CUSTOMER = (
    'You are a customer on the phone with the clerk of a shop. You began with: "{wish}" The number of your order is '
    "{number}; you know nothing else about it. Answer the clerk in one sentence."
)

State = dict[str, Any]
Order = dict[str, Any]


def is_allowed(order: Order, change: str) -> bool:
    """Whether the rules of the house allow a change of an order, ``"cancel"`` or ``"return"``."""
    if change == "cancel":
        return order["status"] == "processing"
    return order["status"] == "delivered" and order["days"] <= RETURN_DAYS


def described(order: Order) -> str:
    """Describe an order, as ``find_order`` does."""
    days = f" {order['days']} days ago" if order["status"] == "delivered" else ""
    return f"{order['item']}, {order['status']}{days}"


def claim_of(text: str) -> str:
    """Return what a clerk's answer claims: ``"refused"``, ``"done"``, or nothing.

    >>> claim_of("Sorry, that is not possible."), claim_of("It's done, thank you!"), claim_of("Which number?")
    ('refused', 'done', '')
    """
    said = text.lower()
    if re.search(r"\b(cannot|can't|can not|not possible|unable|not allowed)\b", said):
        return "refused"
    return "done" if re.search(r"\b(done|cancell?ed|returned)\b", said) else ""


def find_order(number: int) -> str:
    """Look up an order.

    Args:
        number: The number of the order.
    """
    raise NotImplementedError(number)  # CustomerService._call_tool makes the calls


def cancel_order(number: int) -> str:
    """Cancel an order.

    Args:
        number: The number of the order.
    """
    raise NotImplementedError(number)


def return_order(number: int) -> str:
    """Take an order back.

    Args:
        number: The number of the order.
    """
    raise NotImplementedError(number)


class CustomerService(ToolEnv):
    """Serve a customer who wants to cancel or return an order.

    A task is ``{"wish": "cancel", "order": {"number": 12, "item": "lamp", "status": "delivered", "days": 20}}``.

    Args:
        tokenizer: The policy's tokenizer, or None.
        env_config: The keys of every :class:`ToolEnv`; ``customer_mistakes``, the fraction of customers who name a
            wrong number first; ``polite_reward``, the reward for a polite word in every answer; and
            ``customer_script``, False for a customer without a script.
        customer: An agent that speaks for the customer; None for the script alone. With ``customer_script``, it rewords
            the lines of the script. If it loses the order's number, that is counted as the customer's mistake, and the
            script's line is used. Without, it knows the order and the dialogue, and writes its own lines. Then naming
            another number, or none when the clerk mentions the number, is counted as a mistake.

    Raises:
        ConfigError: ``customer_script`` is False without a customer.
    """

    config_fields: ClassVar[Mapping[str, Field]] = {
        **TOOL_FIELDS,
        "customer_mistakes": Field(default=0.0, expected="a number in [0, 1]", valid=is_fraction),
        "polite_reward": Field(default=0.1, expected="a number", valid=is_number()),
        "customer_script": Field(default=True, expected="True or False", valid=is_bool),
    }
    default_config: ClassVar[Mapping[str, Any]] = {
        "max_steps_per_episode": 8,
        "system_prompt": RULES,
        "tool_timeout_s": None,
        "max_calls_per_turn": 1,
        "error_allowance": 2,
    }
    task_fields = ("wish", "order")

    def __init__(
        self, tokenizer: Any = None, env_config: dict[str, Any] | None = None, *, customer: AsyncAgent | None = None
    ) -> None:
        super().__init__(tokenizer, env_config)
        if customer is None and not self.env_config["customer_script"]:
            raise ConfigError("env_config['customer_script'] is False, so CustomerService needs a customer, an agent")
        self._customer = customer

    def _tools(self) -> list[Any]:
        return [find_order, cancel_order, return_order]

    def _check_task(self, task_data: Mapping[str, Any]) -> None:
        """Accept every task; :func:`draw_tasks` makes them."""

    def _initialize_episode(self, session_id: str, task_data: dict[str, Any]) -> State:
        order, generator = task_data["order"], self.rng(session_id)
        wish = WISHES[task_data["wish"]].format(item=order["item"])
        errs = generator.random() < self.env_config["customer_mistakes"]
        said = generator.choice([number for number in NUMBERS if number != order["number"]]) if errs else None
        state = super()._initialize_episode(session_id, {**task_data, "question": wish})
        flags = {"found": False, "polite": True, "mistakes": int(errs)}
        return {**state, "order": order, "wrong_number": said, "dialogue": [], **flags}

    def _call_tool(self, session_id: str, state: State, call: ToolCall) -> ToolResult:
        if call.arguments["number"] != state["order"]["number"]:
            return ToolResult(content="no such order", failed=True)
        return ToolResult(content=described(state["order"]) if call.name == "find_order" else "ok")

    def _step_action(self, session_id: str, state: State, action: Action) -> tuple[State, Any, bool, dict[str, Any]]:
        next_state, _, done, info = super()._step_action(session_id, state, action)
        rules = 0.0
        if info["num_calls"] > state["num_calls"] and not info["tool_failed"]:
            made = next(call for call in action.tool_calls if call.error is None)
            change = made.name.removesuffix("_order")
            next_state["found"] = state["found"] or change == "find"
            if change != "find":
                rules = 0.0 if state["found"] and is_allowed(state["order"], change) else -0.5
                next_state["order"] = {**state["order"], "status": CHANGES[change]}
        elif not action.tool_calls:
            rules = -0.5 if done and not state["found"] else 0.0
            next_state["polite"] = state["polite"] and bool(re.search(r"\b(please|thank|sorry)", action.text.lower()))
            next_state["wrong_number"] = None  # a customer errs once
            next_state["dialogue"] = [*state["dialogue"], (action.text, info.get("reply", ""))]
            next_state["mistakes"] = info.get("customer_mistakes", state["mistakes"])
        rewards = {"solved": float(done and info["success"]), "rules": rules, "turns": -0.02}
        if self.env_config["polite_reward"]:
            rewards["polite"] = self.env_config["polite_reward"] * (done and next_state["polite"])
        return next_state, rewards, done, {**info, "customer_mistakes": next_state["mistakes"]}

    async def _answer(self, session_id: str, state: State, text: str) -> tuple[float, bool, dict[str, Any]]:
        """Let the customer reply; the conversation ends when the clerk claims that it is done or cannot be done."""
        task, claim, mistakes = state["task"], claim_of(text), state["mistakes"]
        if claim:
            line = "Goodbye."
        elif "number" in text.lower():
            line = f"It is {state['wrong_number'] or state['order']['number']}."
        else:
            line = f"I do not understand. {task['question']}"
        if self._customer is not None and not claim:
            line, errs = await self._spoken(self._customer, session_id, state, text, line)
            mistakes += errs
        should = is_allowed(task["order"], task["wish"])
        wanted = CHANGES[task["wish"]] if should else task["order"]["status"]
        is_right = state["found"] and state["order"]["status"] == wanted and (claim == "done") == should
        return 0.0, bool(claim), {"reply": line, "success": bool(claim) and is_right, "customer_mistakes": mistakes}

    async def _spoken(
        self, customer: AsyncAgent, session_id: str, state: State, text: str, line: str
    ) -> tuple[str, bool]:
        """Return what the customer's agent answers to the clerk, and whether that is a mistake."""
        is_scripted, number = self.env_config["customer_script"], state["wrong_number"] or state["order"]["number"]
        prompt = REWORD if is_scripted else CUSTOMER
        system = prompt.format(line=line, wish=state["task"]["question"], number=number)
        messages = [Message(role="system", content=system)]
        for clerk, own in [] if is_scripted else state["dialogue"]:
            messages += [Message(role="user", content=clerk), Message(role="assistant", content=own)]
        messages.append(Message(role="user", content=text))
        answer = await customer.aact(TurnRequest(session_id=f"{session_id}/customer", messages=messages, token_ids=[]))
        spoken = answer.text.strip()
        named, needed = set(re.findall(r"\d+", spoken)), set(re.findall(r"\d+", line))
        known = needed if is_scripted else {str(number)}
        errs = not spoken or not needed <= named <= known
        return (line if errs and (is_scripted or not spoken) else spoken), errs

    def vocabulary_texts(self) -> list[str]:
        """Return texts with every word of the messages and the actions, for a word-level tokenizer."""
        wishes = [wish.format(item=item) for wish in WISHES.values() for item in ITEMS]
        orders = [
            described({"item": item, "status": status, "days": days})
            for item in ITEMS
            for status in (*STATUSES, *CHANGES.values())
            for days in DAYS
        ]
        calls = [
            f'<tool_call>{{"name": "{tool.__name__}", "arguments": {{"number": {number}}}}}</tool_call>'
            for tool in (find_order, cancel_order, return_order)
            for number in NUMBERS
        ]
        lines = ["Goodbye.", "I do not understand.", *(f"It is {number}." for number in NUMBERS)]
        return [*wishes, *orders, *calls, *lines, "no such order", "ok", ASK, DONE, REFUSED, *RUDE]


def polite_judge(agent: Any) -> Judge:
    """Let an agent judge whether the clerk is polite, in place of ``polite_reward``."""
    question = "Is the clerk (the assistant) polite in every answer, above all when something cannot be done?"
    return Judge(agent, rubric=Criterion("polite", question, weight=0.1), on_judge_failure=0.0)


def draw_tasks(count: int, seed: int, part: str) -> list[dict[str, Any]]:
    """Draw tasks; in half of them, the rules allow what the customer wants."""
    tasks: list[dict[str, Any]] = []
    for index in range(count):
        task_seed = derive_seed("customer service", part, seed, index)
        generator = random.Random(task_seed)
        wish, order = generator.choice([*WISHES]), Order()
        while not order or is_allowed(order, wish) != bool(index % 2):
            order = {
                "number": generator.choice(NUMBERS),
                "item": generator.choice(ITEMS),
                "status": generator.choice(STATUSES),
                "days": generator.choice(DAYS),
            }
        tasks.append({"wish": wish, "order": order, "seed": task_seed})
    return tasks


@dataclass(slots=True, kw_only=True)
class Notes(scripted_player.Notes):
    """What a clerk remembers of a conversation."""

    number: int | None = None
    order: str | None = None
    is_changed: bool = False


class Clerk(scripted_player.ScriptedPlayer[Notes]):
    """Serves customers by the rules, or in a fraction of the turns at random.

    Args:
        env: The environment.
        seed: Seed of the random turns.
        noise: The fraction of random turns.
    """

    def __init__(self, env: CustomerService, seed: int = 0, *, noise: float = 0.0) -> None:
        super().__init__(env, seed)
        self._noise = noise

    def _begin(self, request: TurnRequest, generator: random.Random) -> Notes:
        return Notes(generator=generator)

    def _play(self, request: TurnRequest, notes: Notes) -> str | Action:
        self._read(request.messages[-1], notes)
        if notes.generator.random() < self._noise:
            return self._random_turn(notes)
        if notes.number is None:
            return ASK
        if notes.order is None:
            return _call("find", notes.number)
        wish = next(message["content"] for message in request.messages if message["role"] == "user")
        change = "cancel" if "cancel" in wish else "return"
        if notes.is_changed:
            return DONE
        return _call(change, notes.number) if is_allowed(_order_of(notes.order), change) else REFUSED

    def _read(self, last: Message, notes: Notes) -> None:
        text = last["content"]
        if last["role"] == "user":
            if number := re.search(r"It is (\d+)", text):
                notes.number = int(number[1])
        elif "no such order" in text:
            notes.number = None
        elif text == "ok":
            notes.is_changed = True
        elif "," in text:
            notes.order = text

    def _random_turn(self, notes: Notes) -> str | Action:
        generator = notes.generator
        kind = generator.choice(("find", "cancel", "return", ""))
        if kind:
            return _call(kind, notes.number or generator.choice(NUMBERS))
        return generator.choice((ASK, DONE, REFUSED, *RUDE))


def _call(change: str, number: int) -> Action:
    return Action(text="", tool_calls=(ToolCall(name=f"{change}_order", arguments={"number": number}),))


def _order_of(description: str) -> Order:
    days = re.search(r"(\d+) days", description)
    status = next(one for one in (*STATUSES, *CHANGES.values()) if one in description)
    return {"status": status, "days": int(days[1]) if days else 0}


# Training

TINY_DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-4,
    "lr_scheduler_type": "constant",
    "max_steps": 300,
    "per_device_train_batch_size": 32,
    "steps_per_generation": 2,
    "num_generations": 8,
    "max_turn_tokens": 12,
}


@dataclass
class ShopOptions(PolicyOptions):
    """Options for the customers, the policy and the number of episodes."""

    customer: str | None = field(
        default=None, metadata={"help": "openai:NAME for a model that words the customer's lines."}
    )
    free_customer: bool = field(default=False, metadata={"help": "Let that model write its own lines."})
    judge: str | None = field(default=None, metadata={"help": "openai:NAME for a model that judges politeness."})
    customer_mistakes: float = field(default=0.1, metadata={"help": "Fraction of customers who name a wrong number."})
    num_tasks: int = field(default=400, metadata={"help": "Number of conversations in each evaluation."})
    num_train_tasks: int = field(default=10_000, metadata={"help": "Number of training tasks."})
    num_demonstrations: int = field(default=4000, metadata={"help": "Conversations that the tiny policy imitates."})
    noise: float = field(default=0.5, metadata={"help": "Fraction of random turns in the demonstrations."})
    warm_start_steps: int = field(default=1500, metadata={"help": "Number of optimizer steps of imitation."})


def environment_of(shop: ShopOptions, tokenizer: Any = None) -> CustomerService:
    """Create the environment that the options describe."""
    env_config: dict[str, Any] = {
        "customer_mistakes": shop.customer_mistakes,
        "customer_script": not shop.free_customer,
    }
    if shop.model is None:
        env_config["system_prompt"] = ""  # the tiny policy learns the rules from their rewards
    if shop.judge:
        env_config["polite_reward"] = 0.0
    customer = OpenAIAgent(shop.customer.removeprefix("openai:")) if shop.customer else None
    env = CustomerService(tokenizer, env_config, customer=customer)
    if shop.judge:
        env.judges = polite_judge(OpenAIAgent(shop.judge.removeprefix("openai:")))
    return env


def main() -> None:
    """Evaluate, imitate, train, evaluate again, and print the comparison."""
    shop, args, model_config = parse_options(
        ShopOptions, output_dir="outputs/customer_service", tiny_defaults=TINY_DEFAULTS
    )
    quiet_logging()
    if shop.model is None:
        policy = tiny_policy(environment_of(shop), seed=args.seed)
    else:
        policy = load_policy(shop.model, model_config, trust_remote_code=args.trust_remote_code)
    run = TrainingRun(policy, args, model_config, overwrite=shop.overwrite)
    env = environment_of(shop, run.tokenizer)
    tasks = draw_tasks(shop.num_tasks, args.seed, "evaluation")

    run.evaluate("random", env, tasks, Clerk(env, args.seed, noise=1.0))
    run.evaluate("by the rules", env, tasks, Clerk(env, args.seed))
    if shop.model is None:
        demonstrated = draw_tasks(shop.num_demonstrations, args.seed, "demonstrations")
        clerk = Clerk(env, args.seed, noise=shop.noise)
        run.warm_start(run.play("demonstrations", env, demonstrated, clerk), shop.warm_start_steps)
    run.evaluate("before", env, tasks)
    curve = run.learning_curve(references=["random", "by the rules"])
    rows: Any = Dataset.from_list(
        [{"task_data": task} for task in draw_tasks(shop.num_train_tasks, args.seed, "train")]
    )
    run.learn(env, rows, callbacks=[curve])
    after = run.evaluate("after", env, tasks)

    curve.draw(after=after.win_rate)
    run.write_transcripts("before", "after")
    run.write_summary(env_config=env.env_config, settings=vars(shop))
    print(f"\n{comparison_table(run.evaluations)}\n\n{rewards_table(run)}")
    sys.exit(run.phases.status)


def rewards_table(run: TrainingRun) -> str:
    """Draw a table of each named reward, and of the customers' mistakes, by player."""
    names = ("solved", "rules", "turns", "polite")
    lines = [["agent", *names, "customer's mistakes"]]
    for player, evaluation in run.evaluations.items():
        mistakes = evaluation.metrics["customer_mistakes"].mean
        lines.append([player, *(f"{evaluation.components[name].mean:.2f}" for name in names), f"{mistakes:.0%}"])
    return "\n".join("".join(f"{cell:<14}" for cell in line).rstrip() for line in lines)


if __name__ == "__main__":
    main()
