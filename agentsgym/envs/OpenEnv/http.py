"""Ask an OpenEnv server what it says of itself over plain HTTP: ``/health`` and ``/schema``."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPResponse
from typing import Any, cast

from agentsgym.envs.OpenEnv.server import OpenEnvServer, address_of, is_local
from agentsgym.errors import EnvError
from agentsgym.texts import sentence_of, shown


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: headers may hold a secret, which is for the server alone."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def get_json(server: OpenEnvServer, url: str, path: str, *, limit_s: float) -> dict[str, Any]:
    """Get one of a server's JSON objects.

    Args:
        server: Whose.
        url: Where it runs.
        path: As in ``"schema"``.
        limit_s: How long an answer may take.

    Raises:
        ConfigError: A header's environment variable is not set.
        EnvError: It does not answer, or with something else.
    """
    address = address_of(url, "http", path)
    request = urllib.request.Request(address, headers={"Accept": "application/json", **server.request_headers()})
    handlers = [_NoRedirects, *([urllib.request.ProxyHandler({})] if is_local(url) else [])]
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=limit_s) as response:
            raw = _read(response, server.max_message_bytes, time.monotonic() + limit_s)
    except urllib.error.HTTPError as error:
        with error:
            raise EnvError(f"{server.label} answered {address} with HTTP status {error.code}") from error
    except (OSError, HTTPException) as error:
        raise EnvError(f"{server.label} cannot be reached: {sentence_of(error)} (is it running?)") from error
    try:
        answer: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise EnvError(f"{server.label} answered {address} with invalid JSON: {shown(raw, 100)}") from error
    if not isinstance(answer, dict):
        raise EnvError(f"{server.label} answered {address} with JSON that is not an object: {shown(answer, 100)}")
    return cast("dict[str, Any]", answer)


def _read(response: HTTPResponse, most: int, deadline: float) -> bytes:
    """Read a body; urllib's own limit is one of each part that arrives, of which there may be many."""
    raw = b""
    while len(raw) < most and (part := response.read1(most - len(raw))):
        raw += part
        if time.monotonic() > deadline:
            raise TimeoutError("its answer did not arrive completely in time")
    return raw
