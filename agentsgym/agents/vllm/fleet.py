"""Ask one of several vLLM servers for each answer: a session stays with its server, and leaves it only if it is lost.

A server is lost when its process is gone, hangs, or was restarted with other weights. Requests that it owes an
answer are sent to the others, since an answer that nobody has seen is in no record; without any left, their sessions
fail. The next generation batch looks for it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from agentsgym.agents.event_loop import run_coroutine
from agentsgym.agents.policy.context_length import budget_within
from agentsgym.agents.vllm.sampling import Sampled, VLLMSampling
from agentsgym.agents.vllm.server import PassingError, VLLMServer, load_aiohttp, open_session
from agentsgym.errors import AgentError, AgentsGymError

if TYPE_CHECKING:
    from aiohttp import ClientSession

logger = logging.getLogger(__name__)

CONNECTIONS: Final = 512  # to one server, from one rank; further requests wait for one
WAITS_S: Final = (0.0, 0.5, 1.0, 2.0, 4.0)  # before each attempt
PULSE_S: Final = 5.0  # how often a server that owes answers is pinged
MAX_MISSED: Final = 2  # of those questions, in a row


class VLLMServers:
    """Answers requests one by one, each from a server of this rank's choice.

    Attributes:
        servers: All of them, lost ones included.
    """

    def __init__(self, sampling: VLLMSampling, urls: Sequence[str], rank: int) -> None:
        """Connect to nothing yet.

        Args:
            sampling: How tokens are drawn.
            urls: The servers, the same on each rank.
            rank: Rank of this process: ranks start with different servers.

        Raises:
            MissingDependencyError: ``aiohttp`` is not installed.
        """
        load_aiohttp()
        self.servers = [VLLMServer(url) for url in urls]
        self._rank = rank
        self._fields = _wire_fields(sampling)
        self._homes: dict[str, VLLMServer] = {}
        self._session: ClientSession | None = None  # this and the next two live from the first request to finish()
        self._gone: dict[str, asyncio.Future[None]] = {}
        self._watch: asyncio.Task[None] | None = None

    @property
    def first(self) -> VLLMServer:
        """The one that TRL has a client of."""
        return self.servers[0]

    def by_url(self, url: str) -> VLLMServer:
        """One of them."""
        return next(server for server in self.servers if server.url == url)

    async def sample(self, session_id: str, prompt: list[int], room: int) -> Sampled:
        """Answer one prompt with at most ``room`` tokens; a call that is cancelled hangs up, which ends its request.

        Raises:
            AgentError: No server answers, it refuses the request, or the prompt does not fit into its context.
        """
        last = ""
        for wait_s in WAITS_S:
            if last and wait_s:
                await asyncio.sleep(wait_s)
            server = self._home(session_id, last)
            holder = f"the maximum context length of the vLLM server at {server.url}"
            budget = max(1, budget_within(server.context, prompt, room, holder, "raise its --max-model-len, or "))
            try:
                return await self._request(server, prompt, budget)
            except PassingError as error:
                last = f"the vLLM server at {server.url} gave no answer: {error}"
                if error.is_connection and not server.lost:
                    await self._verify(server)
        raise AgentError(f"{last} ({len(WAITS_S)} attempts)")

    def finish(self) -> None:
        """Forget the sessions and close the connections."""
        self._homes.clear()
        for server in self.servers:
            server.num_sessions = 0
        if self._session is not None:
            run_coroutine(self._close())

    def forget(self, session_ids: Sequence[str]) -> None:
        """Forget sessions that are over, while others continue."""
        run_coroutine(self._forget(session_ids))

    def renew(self, lost: Mapping[str, str], marks: Mapping[str, str | None]) -> None:
        """Update which servers are lost, and how the weights of each are marked; requests may be open.

        Args:
            lost: Why a server gets no requests, by URL.
            marks: Version of the weights, by URL; one that is missing is not compared.
        """
        run_coroutine(self._renew(lost, marks))

    def hold(self, url: str) -> None:
        """Send a server no further requests; open ones continue."""
        run_coroutine(self._hold(self.by_url(url)))

    def release(self, url: str) -> None:
        """Send a server the requests that were held back."""
        run_coroutine(self._release(self.by_url(url)))

    def check(self) -> None:
        """Do nothing: servers are looked for when they get weights."""

    def reach(self) -> None:
        """Check that those in use answer this rank, and read their contexts.

        Raises:
            AgentsGymError: One does not.
        """
        run_coroutine(self._reach())

    async def _reach(self) -> None:
        async with open_session(CONNECTIONS) as session:
            for server in self.servers:
                if server.lost:
                    continue
                try:
                    await server.read_model(session)
                except PassingError as error:
                    raise AgentsGymError(
                        f"rank {self._rank} cannot reach the vLLM server at {server.url}: {error}. Every rank "
                        "sends requests, so all machines must reach its address (vllm_server_base_url)"
                    ) from error

    def _home(self, session_id: str, last: str) -> VLLMServer:
        server = self._homes.get(session_id)
        if server is not None and not server.lost:
            return server
        if server is not None:
            server.num_sessions -= 1
            del self._homes[session_id]  # there may be no other one, and it retries
        num = len(self.servers)
        rotated = [self.servers[(self._rank + place) % num] for place in range(num)]
        usable = [server for server in rotated if not server.lost]
        if not usable:
            reasons = "; ".join(f"{server.url}: {server.lost}" for server in self.servers)
            raise AgentError(f"no vLLM server is left ({reasons})" + (f"; {last}" if last else ""))
        server = min(usable, key=lambda one: one.num_sessions)  # the first of those that have fewest
        server.num_sessions += 1
        self._homes[session_id] = server
        return server

    # On the agents' loop

    async def _forget(self, session_ids: Sequence[str]) -> None:
        for session_id in session_ids:
            server = self._homes.pop(session_id, None)
            if server is not None:
                server.num_sessions -= 1

    async def _hold(self, server: VLLMServer) -> None:
        server.is_free.clear()

    async def _release(self, server: VLLMServer) -> None:
        server.is_free.set()

    async def _renew(self, lost: Mapping[str, str], marks: Mapping[str, str | None]) -> None:
        for server in self.servers:
            server.lost, server.version = lost.get(server.url, ""), marks.get(server.url)
            gone = self._gone.get(server.url)
            if gone is not None and gone.done() and not server.lost:
                del self._gone[server.url]

    async def _request(self, server: VLLMServer, prompt: list[int], max_tokens: int) -> Sampled:
        session = self._opened()
        gone = self._gone.setdefault(server.url, asyncio.get_running_loop().create_future())
        asking = asyncio.ensure_future(server.complete(session, prompt, max_tokens, self._fields))
        try:
            await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
        finally:
            asking.cancel()
        raise PassingError(server.lost, is_connection=False)

    def _opened(self) -> ClientSession:
        if self._session is None:
            self._session = open_session(CONNECTIONS * len(self.servers))
            self._watch = asyncio.ensure_future(self._monitor())
        return self._session

    async def _close(self) -> None:
        session, watch = self._session, self._watch
        self._session, self._watch = None, None
        self._gone.clear()
        if watch is not None:
            watch.cancel()
        if session is not None:
            await session.close()

    async def _verify(self, server: VLLMServer) -> None:
        """Look whether a server that did not answer is still the process that it was."""
        try:
            await self._compare(server)
        except PassingError as error:
            if error.is_connection:
                self._lose(server, f"it is gone ({error})")

    async def _compare(self, server: VLLMServer) -> None:
        """Read how its weights are marked; an answer that a push of weights has overtaken is ignored."""
        known = server.version
        version = await server.read_version(self._opened())
        if known is not None and known == server.version and version != known:
            self._lose(
                server,
                "it no longer has the weights that were pushed to it (it was restarted, or another run uses it: their "
                f"version is {version!r}, not {server.version!r})",
            )

    def _lose(self, server: VLLMServer, reason: str) -> None:
        if server.lost:
            return
        server.lost = reason
        logger.warning("the vLLM server at %s gets no more requests in this generation batch: %s", server.url, reason)
        gone = self._gone.get(server.url)
        if gone is not None and not gone.done():
            gone.set_result(None)

    async def _monitor(self) -> None:
        """Ping servers that owe answers: one whose machine is gone never closes its connection."""
        missed = dict.fromkeys((server.url for server in self.servers), 0)
        while True:
            await asyncio.sleep(PULSE_S)
            for server in self.servers:
                if server.num_open and not server.lost:
                    try:
                        await self._compare(server)
                        missed[server.url] = 0
                    except PassingError as error:
                        missed[server.url] += 1
                        if missed[server.url] >= MAX_MISSED:
                            self._lose(server, f"it did not answer {MAX_MISSED} times in a row ({error})")


def _wire_fields(sampling: VLLMSampling) -> Mapping[str, Any]:
    """The options as the server's protocol has them."""
    fields = sampling.fields()
    regex = sampling.generation.structured_outputs_regex
    if regex is not None:
        fields["structured_outputs"] = {"regex": regex}
    return fields
