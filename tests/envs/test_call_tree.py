"""The call that caused a call: in every generated program, and rule by rule."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_client import Client, RecordingAgent, user

from agentsgym.envs.AgentProgram import AgentProgramEnv
from agentsgym.envs.AgentProgram import exchange as exchange_module
from agentsgym.envs.AgentProgram.exchange import CallTree
from agentsgym.testing import chat_tokenizer
from agentsgym.types import Action

TOKENIZER = chat_tokenizer()
TASK = {"name": "delegate", "parameters": {"type": "object", "properties": {"the_whole_task": {"type": "string"}}}}
TOOL = {"type": "function", "function": TASK}


def assistant(text: str, *arguments: Any) -> Any:
    calls = [
        {"type": "function", "id": f"c{k}", "function": {"name": "look", "arguments": one}}
        for k, one in enumerate(arguments)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def tree_of(*answers: Any) -> CallTree:
    """A tree of calls with unrelated prompts."""
    tree = CallTree()
    for number, answer in enumerate(answers):
        assert tree.add(f"id{number}", [user(f"unrelated {number}")], answer, None, None) is None
    return tree


def parent_of(tree: CallTree, *prompt: Any, continued: int | None = None, named: str | None = None) -> int | None:
    return tree.add("new", prompt, assistant("whatever it is"), continued, named)


def test_a_conversation_goes_before_a_name_and_a_name_before_texts() -> None:
    answers = [assistant("the first answer"), assistant("the second answer"), assistant("the third answer")]
    prompt = user("what about the third answer?")
    assert parent_of(tree_of(*answers), prompt, continued=0, named="id1") == 0
    assert parent_of(tree_of(*answers), prompt, named="id1") == 1
    assert parent_of(tree_of(*answers), prompt, named="unknown") == 2
    tree = tree_of(*answers)
    parent_of(tree, prompt, continued=0)
    assert (tree.num_conversations, tree.indices["new"], tree.indices["id1"]) == (3, 3, 1)


def test_the_same_prompt_has_the_same_parent() -> None:
    tree = tree_of(assistant("the first answer"))
    for parent in (None, 0):
        prompt = user("unrelated" if parent is None else "see: the first answer")
        assert parent_of(tree, prompt) == parent
        assert parent_of(tree, user("something else")) is None
        assert parent_of(tree, prompt) == parent


def test_a_retry_is_not_caused_by_an_answer_that_repeats_its_prompt() -> None:
    tree, prompt = CallTree(), [user("Tell a long story.")]
    for call_id in ("first", "retry"):
        assert tree.add(call_id, prompt, assistant("You said: Tell a long story. I will."), None, None) is None


@pytest.mark.parametrize(
    ("answer", "prompt", "is_caused"),
    [
        (assistant("<summary>\nHe opened the door.\n</summary>"), "So far: He opened the door. Go on.", True),
        (assistant("", {"the_whole_task": "Count the lamps in the hall."}), "Task: Count the lamps in the hall.", True),
        (assistant("", {"tasks": ["Count the lamps.", "Count the doors."]}), "Count the doors.", True),
        (assistant("", {"task": "Count the lamps, then the doors."}), "Count the lamps", True),
        (assistant("", {"the_whole_task": "Count."}), "Say what the_whole_task is.", False),
        (assistant("yes"), "yes or no?", False),
        (assistant(""), "go", False),
        (assistant("He opened the door."), "She opened the door.", False),
    ],
)
def test_texts_identify_an_answer(answer: Any, prompt: str, is_caused: bool) -> None:
    assert parent_of(tree_of(answer), user(prompt)) == (0 if is_caused else None)


def test_a_label_that_the_instructions_name_does_not_identify_an_answer() -> None:
    tree, instructions = CallTree(), "Is it very positive or very negative?"
    for number in range(3):
        prompt = [user(f"{instructions} Text {number}.")]
        assert tree.add(f"id{number}", prompt, assistant("very positive"), None, None) is None


def test_arguments_in_a_history_with_other_tools_are_texts_too() -> None:
    call = assistant("", {"task": "Count the lamps in the hall."})
    assert parent_of(tree_of(call), user("go"), call, {"role": "tool", "content": "3", "tool_call_id": "c0"}) == 0


class Talker(RecordingAgent):
    """Answers with a text that no other answer contains, and with a task for another agent if there is a tool."""

    def _answer(self, request: Any) -> Action:
        number = len(self.answers)
        text = f"Answer {number} is {['lamp', 'door', 'key'][number % 3]} {number}."
        if request.tools:
            arguments = {"the_whole_task": f"Please do the piece of work that has the number {number}."}
            text += f"<tool_call>\n{json.dumps({'name': 'delegate', 'arguments': arguments})}\n</tool_call>"
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.answers.append((request.session_id, [*request.token_ids], ids, [-1.0] * len(ids)))
        return Action(text=text, token_ids=ids, logprobs=[-1.0] * len(ids))


class Generated:
    """A program of generated steps, which knows the parent of each of its calls.

    Attributes:
        parents: The id of each call's parent, by the id of the call; None for a root.
    """

    def __init__(self, steps: list[str]) -> None:
        self.steps = steps
        self.parents: dict[str, str | None] = {}

    def __call__(self, task: Any, endpoint: Any) -> float:
        self.client = Client(endpoint)
        self.messages: list[Any] = [user("Begin with the whole of it.")]
        self.latest = self._call(self.messages, None)
        for number, step in enumerate(self.steps):
            getattr(self, step)(number)
        return 1.0

    def _send(self, messages: list[Any], parent: str | None, *, tools: Any = ()) -> tuple[str, Any]:
        answer = self.client.chat(messages, tools=[*tools])
        self.parents[answer["id"].removeprefix("chatcmpl-")] = parent
        return answer["id"].removeprefix("chatcmpl-"), answer["choices"][0]["message"]

    def _call(self, messages: list[Any], parent: str | None) -> str:
        call, answer = self._send(messages, parent)
        self.messages = [*messages, answer]
        return call

    def go_on(self, number: int) -> None:
        self.latest = self._call([*self.messages, user(f"on {number}")], self.latest)

    def begin_anew(self, number: int) -> None:
        self.latest = self._call([user(f"Something else, number {number}.")], None)

    def retry(self, number: int) -> None:
        prompt = [*self.messages, user(f"try {number}")]
        before = self.latest
        self._send(prompt, before)
        self.latest = self._call(prompt, before)

    def sample_twice(self, number: int) -> None:
        prompt = [user(f"A question of its own, number {number}.")]
        self._send(prompt, None)
        self._send(prompt, None)

    def go_on_in_parallel(self, number: int) -> None:
        prompts = [[*self.messages, user(f"{side} {number}")] for side in ("left", "right")]
        with ThreadPoolExecutor(2) as pool:
            both = [*pool.map(lambda prompt: self._send(prompt, self.latest), prompts)]
        self.latest, self.messages = both[1][0], [*prompts[1], both[1][1]]

    def compact(self, number: int) -> None:
        self.latest = self._call([*self.messages, user(f"Summarize {number}.")], self.latest)
        summary = self.messages[-1]["content"]
        self.latest = self._call([user(f"Go on {number}. Until now:\n{summary}\nThat is all.")], self.latest)

    def compact_as_text(self, number: int) -> None:
        history = "\n".join(f"{one['role']}: {one['content']}" for one in self.messages)
        self.latest = self._call([user(f"Summarize {number}:\n{history}")], self.latest)
        self.latest = self._call([user(f"{self.messages[-1]['content']} Go on {number}.")], self.latest)

    def delegate(self, number: int) -> None:
        conversation = [*self.messages, user(f"Delegate {number}.")]
        caller, answer = self._send(conversation, self.latest, tools=[TOOL])
        [call] = answer["tool_calls"]
        task = json.loads(call["function"]["arguments"])["the_whole_task"]
        agent = [{"role": "system", "content": "You work for another."}, user(f"{task}\nBegin.")]
        first, output = self._send(agent, caller)
        _, output = self._send([*agent, output, user("and then?")], first)
        result = {"role": "tool", "tool_call_id": call["id"], "content": output["content"]}
        self.latest, last = self._send([*conversation, answer, result], caller, tools=[TOOL])
        self.messages = [*conversation, answer, result, last]
        self.latest = self._call([user(f"Another tool set. Before: {last['content']}")], self.latest)


STEPS = [name for name in vars(Generated) if not name.startswith("_")]


@settings(max_examples=25)
@given(steps=st.lists(st.sampled_from(STEPS), max_size=8))
def test_the_parents_are_those_of_the_program(steps: list[str]) -> None:
    trees: list[CallTree] = []

    class Kept(CallTree):
        def __init__(self) -> None:
            super().__init__()
            trees.append(self)

    program = Generated(steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "CallTree", Kept)
        [one] = AgentProgramEnv(TOKENIZER, program=program).rollout([{"seed": 1}], Talker(TOKENIZER))
    assert one.error is None
    tree = trees[-1]
    assert len(program.parents) == len(one.turns) == len(tree.parents)
    found = {call: tree.parents[tree.indices[call]] for call in program.parents}
    expected = {call: None if parent is None else tree.indices[parent] for call, parent in program.parents.items()}
    assert found == expected


def test_a_parent_that_is_named_by_the_id_of_a_response_is_found() -> None:
    def program(task: Any, endpoint: Any) -> float:
        client = Client(endpoint)
        first = client.chat([user("one")])["id"]
        client.chat([user("two")])
        client.chat([user("three")], {"x_agentsgym_parent": first})
        client.chat([user("four")], {"x_agentsgym_parent": first.removeprefix("chatcmpl-")})
        return 1.0

    [one] = AgentProgramEnv(TOKENIZER, program=program).rollout([{"seed": 1}], RecordingAgent(TOKENIZER))
    assert [turn.parent for turn in one.turns] == [None, None, 0, 0]
