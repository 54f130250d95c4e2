"""Sample from several vLLM servers: each session stays with one server unless that server is lost.

A server is lost when its process is gone, hangs, or was restarted with other weights. Its open requests are sent to the
other servers, since no record contains an answer that was never received; if no other server is left, their sessions
fail. The next generation batch tries the lost server again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from agentsgym.agents.policy.model import budget_within
from agentsgym.agents.vllm.sampling import Sampled, VLLMSampling
from agentsgym.agents.vllm.server import TransientError, VLLMServer, open_session
from agentsgym.errors import AgentError, AgentsGymError, import_extra
from agentsgym.event_loop import run_coroutine

if TYPE_CHECKING:
    from aiohttp import ClientSession

logger = logging.getLogger(__name__)

CONNECTIONS: Final = 512  # from one rank to one server; further requests wait for a free connection
WAITS_S: Final = (0.0, 0.5, 1.0, 2.0, 4.0)  # before each attempt
PULSE_S: Final = 5.0  # between two checks of a server with open requests
MAX_MISSED: Final = 2  # consecutive checks without a response


class VLLMServers:
    """Sends each request to a server that this rank chooses; coroutines run on the agents' event loop.

    Attributes:
        servers: All servers, including lost ones.
    """

    def __init__(self, sampling: VLLMSampling, urls: Sequence[str], rank: int) -> None:
        """Set up; no connection is opened yet.

        Args:
            sampling: The sampling options.
            urls: Base URLs of the servers, the same on each rank.
            rank: Rank of this process; each rank tries the servers in a different order.

        Raises:
            MissingDependencyError: ``aiohttp`` is not installed.
        """
        import_extra("aiohttp", "vllm")
        self.servers = [VLLMServer(url) for url in urls]
        self._rank = rank
        self._fields = sampling.fields()  # named as in the server's API
        regex = sampling.generation.structured_outputs_regex
        if regex is not None:
            self._fields["structured_outputs"] = {"regex": regex}
        self._assigned: dict[str, VLLMServer] = {}
        self._session: ClientSession | None = None  # this and the next two exist from the first request to finish()
        self._gone: dict[str, asyncio.Future[None]] = {}
        self._watch: asyncio.Task[None] | None = None

    def by_url(self, url: str) -> VLLMServer:
        """Return the server with this URL."""
        return next(server for server in self.servers if server.url == url)

    async def sample(self, session_id: str, prompt: list[int], room: int) -> Sampled:
        """Sample an answer of at most ``room`` tokens; cancellation closes the connection, which aborts the request."""
        last = ""
        for wait_s in WAITS_S:
            if last and wait_s:
                await asyncio.sleep(wait_s)
            server = self._server_for(session_id, last)
            limit_name = f"the maximum context length of the vLLM server at {server.url}"
            budget = max(1, budget_within(server.context, prompt, room, limit_name, "raise its --max-model-len, or "))
            try:
                return await self._request(server, prompt, budget)
            except TransientError as error:
                last = f"the vLLM server at {server.url} returned no usable response: {error}"
                if error.is_connection and not server.lost:
                    await self._verify(server)
        raise AgentError(f"{last} ({len(WAITS_S)} attempts)")

    def finish(self) -> None:
        """Forget the sessions and close the connections."""
        self._assigned.clear()
        for server in self.servers:
            server.num_sessions = 0
        if self._session is not None:
            run_coroutine(self._close())

    async def forget(self, session_ids: Sequence[str]) -> None:
        """Forget sessions that have ended, while others continue."""
        for session_id in session_ids:
            server = self._assigned.pop(session_id, None)
            if server is not None:
                server.num_sessions -= 1

    async def renew(self, lost: Mapping[str, str], versions: Mapping[str, str | None]) -> None:
        """Set why servers are lost (absent: not lost) and their weight versions (None: not compared), by URL."""
        for server in self.servers:
            server.lost, server.version = lost.get(server.url, ""), versions.get(server.url)
            gone = self._gone.get(server.url)
            if gone is not None and gone.done() and not server.lost:
                del self._gone[server.url]

    async def hold(self, url: str) -> None:
        """Hold back further requests to a server; open ones continue."""
        self.by_url(url).can_send.clear()

    async def release(self, url: str) -> None:
        """Send the requests to a server that were held back."""
        self.by_url(url).can_send.set()

    async def check_reachable(self) -> None:
        """Check that this rank can reach the servers in use, and read their context lengths."""
        async with open_session(CONNECTIONS) as session:
            for server in self.servers:
                if server.lost:
                    continue
                try:
                    await server.read_model(session)
                except TransientError as error:
                    raise AgentsGymError(
                        f"rank {self._rank} cannot reach the vLLM server at {server.url}: {error}. Every rank "
                        "sends requests, so all machines must reach its address (vllm_server_base_url)"
                    ) from error

    def _server_for(self, session_id: str, last: str) -> VLLMServer:
        server = self._assigned.get(session_id)
        if server is not None and not server.lost:
            return server
        if server is not None:
            server.num_sessions -= 1
            del self._assigned[session_id]  # even if no server is left, so that a retry does not decrement again
        num = len(self.servers)
        rotated = [self.servers[(self._rank + place) % num] for place in range(num)]
        usable = [server for server in rotated if not server.lost]
        if not usable:
            reasons = "; ".join(f"{server.url}: {server.lost}" for server in self.servers)
            raise AgentError(f"no vLLM server is left ({reasons})" + (f"; {last}" if last else ""))
        server = min(usable, key=lambda one: one.num_sessions)  # the first with the fewest sessions
        server.num_sessions += 1
        self._assigned[session_id] = server
        return server

    async def _request(self, server: VLLMServer, prompt: list[int], max_tokens: int) -> Sampled:
        session = self._open_session()
        gone = self._gone.setdefault(server.url, asyncio.get_running_loop().create_future())
        answer = asyncio.ensure_future(server.complete(session, prompt, max_tokens, self._fields))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
        finally:
            answer.cancel()
        raise TransientError(server.lost, is_connection=False)

    def _open_session(self) -> ClientSession:
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
        """Check whether a server that did not respond is still running with the same weights."""
        try:
            await self._check_version(server)
        except TransientError as error:
            if error.is_connection:
                self._set_lost(server, f"it is gone ({error})")

    async def _check_version(self, server: VLLMServer) -> None:
        """Compare its weight version with the expected one, unless weights were pushed meanwhile."""
        known = server.version
        version = await server.read_version(self._open_session())
        if known is not None and known == server.version and version != known:
            self._set_lost(
                server,
                "it no longer has the weights that were pushed to it (it was restarted, or another run uses it: their "
                f"version is {version!r}, not {server.version!r})",
            )

    def _set_lost(self, server: VLLMServer, reason: str) -> None:
        if server.lost:
            return
        server.lost = reason
        logger.warning("the vLLM server at %s is not used for the rest of this batch: %s", server.url, reason)
        gone = self._gone.get(server.url)
        if gone is not None and not gone.done():
            gone.set_result(None)

    async def _monitor(self) -> None:
        """Check servers with open requests, since a machine that fails does not close its connections."""
        missed = dict.fromkeys((server.url for server in self.servers), 0)
        while True:
            await asyncio.sleep(PULSE_S)
            for server in self.servers:
                if server.num_open.total() and not server.lost:
                    try:
                        await self._check_version(server)
                        missed[server.url] = 0
                    except TransientError as error:
                        missed[server.url] += 1
                        if missed[server.url] >= MAX_MISSED:
                            self._set_lost(server, f"it did not respond {MAX_MISSED} times in a row ({error})")
