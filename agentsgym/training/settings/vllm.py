"""The settings of vLLM servers that TRL does not have: several of them, and how long a push of weights may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from agentsgym.fields import is_positive_number, or_none
from agentsgym.training.settings.fields import number


def _are_urls(value: Any) -> bool:
    urls = cast("list[Any]", value) if isinstance(value, list) else []
    is_each = all(isinstance(url, str) and url.startswith(("http://", "https://")) for url in urls)
    return bool(urls) and is_each and len(set(urls)) == len(urls)


@dataclass
class VLLMSettings:
    """Which vLLM servers sample, and within what time they get the weights.

    Attributes:
        vllm_server_base_urls: Base URLs of several servers, all of which every rank can reach; a session stays with one
            of them. None for TRL's single one, ``vllm_server_base_url`` or host and port. The server at index i gets
            its weights over port ``vllm_group_port + i``.
        vllm_sync_timeout_s: Wall-clock seconds for pushing the weights to one server, after which the run stops.
    """

    vllm_server_base_urls: list[str] | None = number(  # noqa: RUF009  # it makes a field
        None,
        "Base URLs of several vLLM servers.",
        expected="a list of different URLs that begin with http:// or https://, or None",
        valid=or_none(_are_urls),
    )
    vllm_sync_timeout_s: float = number(
        600.0, "Limit of one push of weights.", expected="a positive number of seconds", valid=is_positive_number
    )
