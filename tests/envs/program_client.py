"""A minimal client of the endpoint, and an agent whose every sampled token is known: what tests of programs share."""

import http.client
import json
import random
import threading
from collections.abc import Sequence
from typing import Any

from agentsgym import Action, Agent, TurnRequest


class Client:
    """Posts JSON to the endpoint of an episode."""

    def __init__(self, endpoint: Any) -> None:
        self.host, self.key = endpoint.base_url.split("/")[2], endpoint.api_key
        self.timeout = 60.0

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.host, timeout=self.timeout)
        sent = {"Authorization": f"Bearer {self.key}", **{name.replace("_", "-"): one for name, one in headers.items()}}
        try:
            connection.request("POST", path, json.dumps(body), sent)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def chat(self, messages: Sequence[Any], headers: Any = (), **fields: Any) -> Any:
        """Return the body of a chat completion, which must succeed."""
        body = {"model": "policy", "messages": [*messages], **fields}
        status, answer = self.post("/v1/chat/completions", body, **dict(headers))
        assert status == 200, answer
        return answer

    def speak(self, *messages: Any, **fields: Any) -> Any:
        """Return the message of the only choice."""
        return self.chat(messages, **fields)["choices"][0]["message"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class RecordingAgent(Agent):
    """Samples random tokens of ASCII text, and remembers the exact prompt and tokens of every answer."""

    def __init__(self, tokenizer: Any, seed: int = 0, texts: Sequence[str] = ()) -> None:
        self.tokenizer, self.generator, self.texts = tokenizer, random.Random(seed), [*texts]
        self.answers: list[tuple[str, list[int], list[int], list[float]]] = []
        self.most = 0
        self._lock = threading.Lock()

    def act(self, requests: Sequence[TurnRequest]) -> list[Action]:
        with self._lock:
            self.most = max(self.most, len(requests))
            return [self._answer(one) for one in requests]

    def _answer(self, request: TurnRequest) -> Action:
        if self.texts:
            text = self.texts[len(self.answers) % len(self.texts)]
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:  # letter by letter, which is not how the tokenizer would encode the text
            text = "".join(self.generator.choice("abcdefghij klmnop") for _ in range(self.generator.randint(1, 12)))
            ids = [one for letter in text for one in self.tokenizer(letter, add_special_tokens=False)["input_ids"]]
        if request.max_new_tokens is not None:
            ids = ids[: request.max_new_tokens]
        logprobs = [-self.generator.random() for _ in ids]
        self.answers.append((request.session_id, [*request.token_ids], ids, logprobs))
        text = self.tokenizer.decode(ids)
        return Action(text=text, token_ids=ids, logprobs=logprobs, policy_version=3)


def converse(task: Any, endpoint: Any) -> float:
    """A program of three calls, each of which continues the last one; worker processes import it by this name."""
    client, messages = Client(endpoint), [user(f"go {task['seed']}")]
    for number in range(3):
        messages += [client.speak(*messages), user(f"on {number}")]
    return 2.0
