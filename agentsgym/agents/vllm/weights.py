"""Hand the trained weights to vLLM: to the engine of this process, or to servers, within a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import torch

from agentsgym.agents.event_loop import run_coroutine
from agentsgym.agents.vllm.fleet import VLLMServers
from agentsgym.agents.vllm.server import PassingError, VLLMServer, open_session
from agentsgym.errors import AgentsGymError, ConfigError
from agentsgym.ranks import DeferredError, all_gather_objects, raise_on_all_ranks
from agentsgym.texts import sentence_of, shown

logger = logging.getLogger(__name__)

PUSH_LIMIT_S: Final = 600.0
_POLL_S: Final = 2.0  # between two looks for a server that is not there
_PROBES: Final = 32  # tokens whose text both tokenizers encode


class EngineWeights:
    """The weights of TRL's engine in this process.

    Attributes:
        step: The optimizer steps behind them; None where they are to be loaded again.
    """

    def __init__(self, generation: Any) -> None:
        """Take note of whether the engine sleeps between rollouts."""
        self.step: int | None = None
        self._generation = generation
        self._sleeps: bool = generation.mode != "server" and generation.enable_sleep_mode

    def load(self, step: int) -> None:
        """Collective: load the weights of a step if they are others, and wake the engine.

        Raises:
            AgentsGymError: Another rank failed, which raises its own error.
        """
        if step == self.step and not self._sleeps:
            return
        self.step = None
        with raise_on_all_ranks():
            self._generation.sync_weights()
            self._wake()
        self.step = step

    def loaded(self, step: int) -> None:
        """Note that the trainer itself has loaded the weights of this step; an engine that sleeps loads them again."""
        self.step = step

    def sleep(self) -> None:
        """Put an engine to sleep that sleeps between rollouts."""
        if self._sleeps and not self._generation.enable_sleep_mode:
            self._generation.llm.sleep(level=2)
            self._generation.enable_sleep_mode = True

    def _wake(self) -> None:
        """Wake the parts that loading weights does not, and keep TRL from ending each call with sleep."""
        if self._sleeps and self._generation.enable_sleep_mode:
            self._generation.llm.wake_up(tags=["kv_cache"])
            self._generation.enable_sleep_mode = False


@dataclass(frozen=True, slots=True)
class _Plan:
    """The main rank's findings, which all ranks act on.

    Attributes:
        lost: Why a server is left out, by URL.
        push: URLs of those that get the weights, in order.
    """

    lost: dict[str, str]
    push: list[str]


class ServerWeights:
    """The weights of vLLM servers: the main rank pushes them through TRL's client, one for each server.

    Each push marks the server's weights, so that one that was started again, or that another run has pushed its
    own weights to, is found out. It gets the weights again before the next rollouts.

    Attributes:
        step: The optimizer steps behind them; None where they are to be pushed again.
    """

    def __init__(
        self, generation: Any, servers: VLLMServers, tokenizer: Any, limit_s: float, *, pauses: bool = False
    ) -> None:
        """Push nothing yet.

        Args:
            generation: TRL's, whose client of the first server it has on the main rank.
            servers: The servers that this rank uses.
            tokenizer: The model's.
            limit_s: Seconds for one push to one server.
            pauses: Whether requests are open meanwhile, so that the server has to pause.
        """
        self._pauses = pauses
        self.step: int | None = None
        self._generation, self._servers, self._tokenizer = generation, servers, tokenizer
        self._limit_s = limit_s
        self._clients: dict[str, Any] = {}  # the rest is the main rank's
        self._checked: set[str] = set()
        self._reconnect: set[str] = set()
        self._run, self._num_pushes = uuid.uuid4().hex[:12], 0
        self._marks: dict[str, str | None] = {}

    def load(self, step: int) -> None:
        """Collective: see that every server is there and has the weights of a step.

        Raises:
            AgentsGymError: No server is there, one cannot be used, or a push failed or took too long; on all ranks.
        """
        is_new, self.step = step != self.step, None
        lost = set(all_gather_objects([server.url for server in self._servers.servers if server.lost]))
        error, plans = DeferredError(), list[_Plan]()
        with error.capturing():
            if self._generation.accelerator.is_main_process:
                plans.append(run_coroutine(self._plan(lost, is_new=is_new)))
        (plan,) = all_gather_objects(plans, error.first)
        known = {one.url: one.version for one in self._servers.servers if one.url not in plan.push}
        self._servers.renew(plan.lost, known)
        for url in plan.push:
            try:
                with raise_on_all_ranks():
                    self._servers.hold(url)  # on all ranks before it pauses
                with raise_on_all_ranks():
                    self._push(url)
                self._servers.by_url(url).step = step
            finally:
                self._servers.release(url)
        marks = all_gather_objects([self._marks] if plans else [])[0]
        self._servers.renew(plan.lost, marks)
        with raise_on_all_ranks():
            if plan.push or lost:
                self._servers.reach()
        self.step = step

    def loaded(self, step: int) -> None:
        """Note that TRL itself has pushed the weights of this step to its server, the first one; they have no mark."""
        self.step = self._servers.first.step = step
        self._marks[self._servers.first.url] = None

    def sleep(self) -> None:
        """Do nothing: servers are not put to sleep."""

    # On the main rank

    async def _plan(self, lost: set[str], *, is_new: bool) -> _Plan:
        """Find the servers that are there, and those of them that need the weights."""
        missing: dict[str, str] = {}
        push: list[str] = []
        async with open_session(8) as session:
            found = await self._found(session)
            for server in self._servers.servers:
                if isinstance(version := found[server.url], PassingError):
                    missing[server.url] = f"it is not there ({version})"
                    continue
                known = self._marks.get(server.url)
                if server.url in self._marks and (version != known if known is not None else server.url in lost):
                    logger.warning("the vLLM server at %s was restarted; the weights are pushed again", server.url)
                    self._reconnect.add(server.url)
                    self._checked.discard(server.url)
                    del self._marks[server.url]
                if server.url not in self._checked:
                    await self._check(server, session)
                    self._checked.add(server.url)
                if is_new or server.url not in self._marks:
                    push.append(server.url)
        for url, reason in missing.items():
            logger.warning("the vLLM server at %s is left out of this generation batch: %s", url, reason)
        return _Plan(missing, push)

    async def _found(self, session: Any) -> dict[str, Any]:
        """The mark of each server's weights, or why it does not answer; waited for until one does, or at first all."""
        limit_s = self._generation.server_timeout
        deadline = time.monotonic() + limit_s
        while True:
            found: dict[str, Any] = {}
            for server in self._servers.servers:
                try:
                    found[server.url] = await server.read_version(session)
                except PassingError as error:
                    found[server.url] = error
            missing = [url for url, version in found.items() if isinstance(version, PassingError)]
            if not missing or (self._marks and len(missing) < len(found)):
                return found
            if time.monotonic() >= deadline:
                raise AgentsGymError(
                    f"the vLLM server at {missing[0]} did not answer within vllm_server_timeout = {limit_s:g} s: "
                    f"{found[missing[0]]}; restart it and resume the run from its last checkpoint"
                )
            await asyncio.sleep(_POLL_S)

    async def _check(self, server: VLLMServer, session: Any) -> None:
        """Refuse a server of another tokenizer, and warn of one that has another model or is too small."""
        try:
            await server.read_model(session)
            text, ids = _probe(self._tokenizer)
            theirs = await server.encode(session, text)
        except PassingError as error:
            raise AgentsGymError(f"the vLLM server at {server.url} cannot be used: {error}") from error
        if theirs is not None and theirs != ids:
            raise ConfigError(
                f"the vLLM server at {server.url} serves {server.root!r} with a tokenizer that differs from the "
                f"trainer's: it encodes {shown(text, 80)} as {shown(theirs, 80)}, the trainer's as {shown(ids, 80)}; "
                "start it with the model that is trained"
            )
        name = getattr(getattr(self._generation.model, "config", None), "name_or_path", "") or ""
        if name and server.root.rstrip("/").rpartition("/")[2] != name.rstrip("/").rpartition("/")[2]:
            logger.warning(
                "the vLLM server at %s was started with %r, and %r is trained: its weights are replaced by those of "
                "the model in training, which works only if both have the same architecture",
                server.url,
                server.root,
                name,
            )
        longest = self._generation.max_completion_length
        if server.context is not None and longest is not None and server.context <= longest:
            logger.warning(
                "the vLLM server at %s has a maximum context length of %d tokens, and max_completion_length=%d lets "
                "conversations grow beyond it, whose episodes then fail: start it with a larger --max-model-len, or "
                "lower max_completion_length",
                server.url,
                server.context,
                longest,
            )

    def _push(self, url: str) -> None:
        """Collective: push the weights to one server; without time limit on the ranks that only hand them over."""
        if not self._generation.accelerator.is_main_process:
            self._generation.sync_weights()
            return
        self._num_pushes += 1
        self._marks.pop(url, None)
        with self._paused(url):
            self._push_and_mark(url)

    def _push_and_mark(self, url: str) -> None:
        within(
            self._limit_s,
            functools.partial(self._push_through_client, url),
            f"pushing the weights to the vLLM server at {url} did not end within "
            f"{self._limit_s:g} s: it hangs, its process is gone, or the network between them is blocked "
            f"(vllm_group_port); the last checkpoint is intact",
            self._generation.accelerator.device,
        )
        mark = f"{self._run}-{self._num_pushes}"
        self._marks[url] = mark if run_coroutine(self._mark(url, mark)) else None

    @contextlib.contextmanager
    def _paused(self, url: str) -> Generator[None]:
        """Pause a server inside where requests may be open: they continue with the new weights.

        Its cache is cleared, so that they are prefilled again. Keys and values of the older weights under the new ones
        would make the log-probabilities those of no version.
        """
        if not self._pauses:
            yield
            return
        if not run_coroutine(self._switch(url, "pause?mode=keep&clear_cache=true")):
            raise ConfigError(
                f"the vLLM server at {url} cannot pause, and max_staleness above 0 pushes weights while it generates: "
                "start it with VLLM_SERVER_DEV_MODE=1"
            )
        try:
            yield
        except BaseException:
            try:
                run_coroutine(self._switch(url, "resume"))
            except AgentsGymError as error:  # the push's error has more detail
                logger.warning("%s", sentence_of(error))
            raise
        run_coroutine(self._switch(url, "resume"))

    async def _switch(self, url: str, command: str) -> bool:
        async with open_session(1) as session:
            try:
                return await self._servers.by_url(url).switch(session, command)
            except PassingError as error:
                raise AgentsGymError(f"the vLLM server at {url} became unreachable: {error}") from error

    def _push_through_client(self, url: str) -> None:
        try:
            client = self._client(url)
            if url in self._reconnect:
                client.close_communicator()
                client.init_communicator(device=self._generation.accelerator.device)
                self._reconnect.discard(url)
            self._generation.vllm_client = client
            self._generation.sync_weights()
        except Exception as error:
            raise AgentsGymError(
                f"the weights could not be pushed to the vLLM server at {url}: {type(error).__name__}: "
                f"{sentence_of(error)}; it must run the model in training; see its log"
            ) from error

    def _client(self, url: str) -> Any:
        """TRL's client of a server; that of the first one is there."""
        if url not in self._clients:
            index = [server.url for server in self._servers.servers].index(url)
            first = self._generation.vllm_client
            client = first
            if index:
                client = type(first)(
                    base_url=url,
                    group_port=self._generation.group_port + index,
                    connection_timeout=self._generation.server_timeout,
                )
                client.init_communicator(device=self._generation.accelerator.device)
            _limit_requests(client, self._limit_s)
            self._clients[url] = client
        return self._clients[url]

    async def _mark(self, url: str, mark: str) -> bool:
        async with open_session(1) as session:
            try:
                return await self._servers.by_url(url).mark(session, mark)
            except PassingError as error:
                raise AgentsGymError(
                    f"the vLLM server at {url} became unreachable after the weights were pushed: {error}"
                ) from error


def within(limit_s: float, call: Callable[[], None], too_late: str, device: torch.device) -> None:
    """Make a call that may hang where nothing can interrupt it, on a thread that is left alone if it does.

    Args:
        limit_s: Seconds until it is given up.
        call: Function to call; its exceptions propagate.
        too_late: The sentence of the error.
        device: Its device.

    Raises:
        AgentsGymError: It did not end in time; logged at once, since other ranks may wait in a call that does not end.
    """
    outcome: Future[None] = Future()
    stream: Any = None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def run() -> None:
        try:
            if stream is not None:
                torch.accelerator.set_stream(stream)  # and with it the device, which is a thread's own
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001  # raised on the thread that waits
            outcome.set_exception(error)

    threading.Thread(target=run, name="agentsgym-push", daemon=True).start()
    try:
        outcome.result(limit_s)
    except TimeoutError:
        if outcome.done():
            raise  # the call's own
        logger.error("%s", too_late)  # noqa: TRY400  # it has no traceback to show
        raise AgentsGymError(too_late) from None


def _limit_requests(client: Any, limit_s: float) -> None:
    """Have the client's own requests end in time, unrepeated: a thread of it that hangs would keep the process."""
    session = client.session
    session.request = functools.partial(session.request, timeout=limit_s)
    adapter = session.get_adapter(client.base_url)
    adapter.max_retries = adapter.max_retries.new(read=0)


def _probe(tokenizer: Any) -> tuple[str, list[int]]:
    """A text of tokens from all over the vocabulary, and its ids."""
    special = set(tokenizer.added_tokens_decoder)
    plain = [index for index in sorted(tokenizer.get_vocab().values()) if index not in special]
    chosen = plain[:: max(1, len(plain) // _PROBES)]
    text = " ".join(str(tokenizer.decode([index])) for index in chosen)
    return text, list(tokenizer.encode(text, add_special_tokens=False))
