"""A harness of verifiers that calls the model in this process: the package's own install programs with uv."""

from __future__ import annotations

from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire


class DirectHarness(vf.Harness[vf.HarnessConfig]):
    """Sends the conversation to the model once a turn."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # noqa: PLR0913, PLR0917  # as verifiers calls it
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        """Call the model."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            response = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
            response.raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["DirectHarness"]
