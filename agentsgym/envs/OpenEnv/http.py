"""Request an OpenEnv server's ``/health`` and ``/schema`` over HTTP."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, cast

from agentsgym.envs.OpenEnv.server import OpenEnvServer, address_of, is_local
from agentsgym.errors import EnvError
from agentsgym.texts import sentence_of, shown


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: headers may contain a secret that only the server may receive."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def get_json(server: OpenEnvServer, url: str, path: str, *, limit_s: float) -> dict[str, Any]:
    """Request a JSON object from a path on a server, whose complete response may take ``limit_s`` seconds.

    Raises:
        ConfigError: A header's environment variable is not set.
        EnvError: The server does not respond, or its response is not a JSON object.
    """
    address = address_of(url, "http", path)
    request = urllib.request.Request(address, headers={"Accept": "application/json", **server.request_headers()})
    late = f"{server.label} did not send a complete response within {limit_s:g} s"
    handlers = [_NoRedirects, *([urllib.request.ProxyHandler({})] if is_local(url) else [])]
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=limit_s) as response:
            # urllib applies the limit to each part of the body separately, and there may be many.
            raw, deadline = b"", time.monotonic() + limit_s
            while len(raw) < server.max_message_bytes and (part := response.read1(server.max_message_bytes - len(raw))):
                raw += part
                if time.monotonic() > deadline:
                    raise EnvError(late)
    except urllib.error.HTTPError as error:
        with error:
            raise EnvError(f"{server.label} responded to {address} with HTTP status {error.code}") from error
    except TimeoutError as error:
        raise EnvError(late) from error
    except (OSError, HTTPException) as error:
        raise EnvError(f"{server.label} cannot be reached: {sentence_of(error)} (is it running?)") from error
    try:
        answer: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise EnvError(f"{server.label} responded to {address} with invalid JSON: {shown(raw, 100)}") from error
    if not isinstance(answer, dict):
        raise EnvError(f"{server.label} responded to {address} with JSON that is not an object: {shown(answer, 100)}")
    return cast("dict[str, Any]", answer)
