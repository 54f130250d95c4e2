"""A program of two calls that the tests of training play, on one rank and on two."""

from __future__ import annotations

import http.client
import json
from typing import Any, ClassVar

from agentsgym.envs.AgentProgram import AgentProgramEnv


def speak(endpoint: Any, messages: list[Any]) -> tuple[str, str]:
    """Call the endpoint; return the id of the call and the answer."""
    connection = http.client.HTTPConnection(endpoint.base_url.split("/")[2], timeout=60)
    body = json.dumps({"model": "policy", "messages": messages})
    connection.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {endpoint.api_key}"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer["id"], answer["choices"][0]["message"]["content"]


def speak_blue(task: Any, endpoint: Any) -> None:
    """Two conversations of one call each; each is rewarded by itself if it names the color."""
    for _ in range(2):
        call, text = speak(endpoint, [{"role": "user", "content": "Say a color."}])
        endpoint.reward(float("blue" in text), call)


class SayBlueTwice(AgentProgramEnv):
    """The program as an environment that is built from ``env_config`` alone."""

    program: ClassVar[Any] = staticmethod(speak_blue)
