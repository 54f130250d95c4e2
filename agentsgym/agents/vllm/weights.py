"""Load the trained weights into vLLM: into the engine of this process, or into servers, within a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import torch

from agentsgym.agents.policy.model import fixed_rope_length, warn_of_context
from agentsgym.agents.vllm.adapters import AdapterVersions
from agentsgym.agents.vllm.fleet import VLLMServers
from agentsgym.agents.vllm.server import TransientError, VLLMServer, open_session
from agentsgym.errors import AgentsGymError, ConfigError
from agentsgym.event_loop import run_coroutine
from agentsgym.ranks import DeferredError, all_gather_objects, raise_on_all_ranks
from agentsgym.texts import sentence_of, shown

logger = logging.getLogger(__name__)

PUSH_LIMIT_S: Final = 600.0  # for one push to one server
_POLL_S: Final = 2.0  # between two attempts to reach a server
_NUM_TOKENS: Final = 32  # in the text used to compare tokenizers


class EngineWeights:
    """The weights of TRL's engine in this process.

    Attributes:
        step: Optimizer step of the loaded weights; None if they must be loaded again.
    """

    def __init__(self, generation: Any) -> None:
        self.step: int | None = None
        self._generation = generation
        self._sleeps: bool = generation.enable_sleep_mode

    def load(self, step: int) -> None:
        """Load the weights of a step unless they are already loaded, and wake the engine. Collective.

        Raises:
            AgentsGymError: Another rank failed (which raises its own error).
        """
        if step == self.step and not self._sleeps:
            return
        self.step = None
        with raise_on_all_ranks():
            self._generation.sync_weights()
            if self._sleeps and self._generation.enable_sleep_mode:
                self._generation.llm.wake_up(tags=["kv_cache"])  # loading the weights has woken the rest
                self._generation.enable_sleep_mode = False  # otherwise, TRL puts the engine to sleep after each call
        self.step = step

    def loaded(self, step: int) -> None:
        """Record that the trainer itself has loaded the weights of this step; a sleeping engine loads them again."""
        self.step = step

    def sleep(self) -> None:
        """Put the engine to sleep, if it sleeps between rollouts."""
        if self._sleeps and not self._generation.enable_sleep_mode:
            self._generation.llm.sleep(level=2)
            self._generation.enable_sleep_mode = True


class ServerWeights:
    """The weights of vLLM servers, which the main rank pushes through TRL's clients, one per server.

    Each push sets the server's weight version, so that a restart, or a push from another run, is noticed; the weights
    are then pushed again before the next rollouts. Servers that can load adapters load these instead.

    Attributes:
        step: Optimizer step of the pushed weights; None if they must be pushed again.
    """

    def __init__(self, generation: Any, servers: VLLMServers, tokenizer: Any, *, pauses: bool) -> None:
        """Set up; nothing is pushed yet.

        Args:
            generation: TRL's ``VLLMGeneration``; on the main rank, it has a client for the first server.
            servers: The servers that this rank uses.
            tokenizer: The model's tokenizer.
            pauses: Whether servers must pause while weights are pushed, because requests are open then.
        """
        has_adapters = hasattr(generation.model, "get_base_model")
        self._adapters = AdapterVersions(generation, num_slots=2 if pauses else 1) if has_adapters else None
        self._reasons: dict[str, str] = {}  # why servers need merged weights, by URL; empty if they load adapters
        self._pauses = pauses
        self.step: int | None = None
        self._generation, self._servers, self._tokenizer = generation, servers, tokenizer
        self._clients: dict[str, Any] = {}  # this and the following are used only on the main rank
        self._checked: set[str] = set()
        self._reconnect: set[str] = set()
        self._run, self._num_pushes = uuid.uuid4().hex[:12], 0
        self._versions: dict[str, str | None] = {}

    def load(self, step: int) -> None:
        """Check the servers, and push the weights of a step to those that need them. Collective.

        Raises:
            AgentsGymError: No server responds, one cannot be used, or a push failed or took too long; on all ranks.
        """
        is_new, self.step = step != self.step, None
        were_lost = set(all_gather_objects([server.url for server in self._servers.servers if server.lost]))
        error, plans = DeferredError(), list[tuple[dict[str, str], list[str], bool]]()
        with error.capturing():
            if self._generation.accelerator.is_main_process:
                plans.append(run_coroutine(self._plan(were_lost, is_new=is_new)))
        ((lost, push, with_adapters),) = all_gather_objects(plans, error.first)
        known = {one.url: one.version for one in self._servers.servers if one.url not in push}
        run_coroutine(self._servers.renew(lost, known))
        adapters = self._adapters if with_adapters else None
        if adapters:
            in_use = all_gather_objects([one for it in self._servers.servers for one in (it.adapter, *it.num_open)])
            with raise_on_all_ranks():
                adapters.write(set(in_use))
        for url in push:
            self._update(self._servers.by_url(url), step, adapters)
        versions = all_gather_objects([self._versions] if plans else [])[0]
        run_coroutine(self._servers.renew(lost, versions))
        with raise_on_all_ranks():
            if push or were_lost:
                run_coroutine(self._servers.check_reachable())
        self.step = step

    def loaded(self, step: int) -> None:
        """Record that TRL itself has pushed the weights of this step to the first server."""
        self._adapters, first = None, self._servers.servers[0]
        self.step = first.step = step
        if self._generation.accelerator.is_main_process and first.url not in self._versions:  # for later runs to see
            with contextlib.suppress(AgentsGymError):
                run_coroutine(self._ask(first.url, first.set_version, self._run, "failed after a push"))
        self._versions[first.url] = None

    def _update(self, server: VLLMServer, step: int, adapters: AdapterVersions | None) -> None:
        """Let a server load the adapters, or push merged weights, while its requests are held back. Collective."""
        error, names = DeferredError(), list[str]()
        try:
            with error.capturing():
                run_coroutine(self._servers.hold(server.url))
                if adapters and self._generation.accelerator.is_main_process:
                    names.append(self._load_adapters(server, adapters.folder))
            adapter = "".join(all_gather_objects(names, error.first))  # requests are held back before the server pauses
            with raise_on_all_ranks():
                if not adapter:
                    self._push(server.url)
            server.adapter, server.step = adapter, step
        finally:
            run_coroutine(self._servers.release(server.url))

    # On the main rank

    async def _plan(self, lost: set[str], *, is_new: bool) -> tuple[dict[str, str], list[str], bool]:
        """Return why servers are skipped, the URLs of those that need the weights, and whether some load adapters."""
        missing: dict[str, str] = {}
        push: list[str] = []
        async with open_session(8) as session:
            found = await self._read_versions(session)
            for server in self._servers.servers:
                if isinstance(version := found[server.url], TransientError):
                    missing[server.url] = f"it does not respond ({version})"
                    continue
                known = self._versions.get(server.url)
                if server.url in self._versions and (version != known if known is not None else server.url in lost):
                    logger.warning("the vLLM server at %s was restarted; the weights are pushed again", server.url)
                    self._reconnect.add(server.url)
                    self._checked.discard(server.url)
                    del self._versions[server.url]
                if server.url not in self._checked:
                    try:
                        await self._check(server, session, version)
                    except TransientError as error:
                        raise AgentsGymError(f"the vLLM server at {server.url} cannot be used: {error}") from error
                    self._checked.add(server.url)
                if is_new or server.url not in self._versions:
                    push.append(server.url)
        for url, reason in missing.items():
            logger.warning("the vLLM server at %s is not used in this generation batch: %s", url, reason)
        return missing, push, any(not self._reasons.get(url, "merged") for url in push)

    async def _read_versions(self, session: Any) -> dict[str, Any]:
        """Read each server's weight version or error; wait until one server responds, or at first until all do."""
        limit_s = self._generation.server_timeout
        deadline = time.monotonic() + limit_s
        while True:
            found: dict[str, Any] = {}
            for server in self._servers.servers:
                try:
                    found[server.url] = await server.read_version(session)
                except TransientError as error:
                    found[server.url] = error
            missing = [url for url, version in found.items() if isinstance(version, TransientError)]
            if not missing or (self._versions and len(missing) < len(found)):
                return found
            if time.monotonic() >= deadline:
                raise AgentsGymError(
                    f"the vLLM server at {missing[0]} did not respond within vllm_server_timeout = {limit_s:g} s: "
                    f"{found[missing[0]]}; restart it and resume the run from its last checkpoint"
                )
            await asyncio.sleep(_POLL_S)

    async def _check(self, server: VLLMServer, session: Any, version: str | None) -> None:
        """Reject a server with a different tokenizer, warn about others, and decide whether it loads adapters."""
        special = set(self._tokenizer.added_tokens_decoder)
        plain = [index for index in sorted(self._tokenizer.get_vocab().values()) if index not in special]
        chosen = plain[:: max(1, len(plain) // _NUM_TOKENS)]  # spread over the vocabulary
        text = " ".join(str(self._tokenizer.decode([index])) for index in chosen)
        ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        await server.read_model(session)
        theirs = await server.encode(session, text)
        if theirs is not None and theirs != ids:
            raise ConfigError(
                f"the vLLM server at {server.url} serves {server.root!r} with a tokenizer that differs from the "
                f"trainer's: it encodes {shown(text, 80)} as {shown(theirs, 80)}, but the trainer's encodes it as "
                f"{shown(ids, 80)}; start the server with the model that this run is training"
            )
        name = getattr(getattr(self._generation.model, "config", None), "name_or_path", "") or ""
        differs = name and server.root.rstrip("/").rpartition("/")[2] != name.rstrip("/").rpartition("/")[2]
        if differs:
            logger.warning(
                "the vLLM server at %s was started with %r, but this run trains %r: the server's weights are replaced "
                "with the trained model's, which works only if both have the same architecture",
                server.url,
                server.root,
                name,
            )
        fixed = fixed_rope_length(self._generation.model)
        if fixed is not None and (server.context or 0) > fixed:
            raise ConfigError(
                f"the vLLM server at {server.url} has a context of {server.context} tokens, but beyond {fixed}, the "
                "frequencies of the model's RoPE change, in vLLM also those of shorter conversations: start the server "
                f"with --max-model-len {fixed}"
            )
        warn_of_context(f"the vLLM server at {server.url}", server.context, self._generation.max_completion_length)
        if self._adapters is not None:
            reason = "" if differs else await self._adapters.reason_to_merge(server, session, version, ids)
            self._note(server.url, "it was started with another model" if differs else reason)

    def _load_adapters(self, server: VLLMServer, folder: Path) -> str:
        """Let a server load the adapters in a folder; return their name, empty if it needs merged weights."""
        if not self._reasons[server.url]:
            reason = run_coroutine(self._ask(server.url, server.load_adapter, str(folder), "failed to load adapters"))
            self._note(server.url, reason)
            self._versions[server.url] = folder.name
        return "" if self._reasons[server.url] else folder.name

    def _note(self, url: str, reason: str) -> None:
        """Record why a server needs merged weights; the reason is empty if it loads adapters."""
        self._reasons[url] = reason
        if reason:
            logger.warning("the vLLM server at %s gets merged weights instead of adapters: %s", url, reason)

    def _push(self, url: str) -> None:
        """Push the weights to one server and set its weight version; the main rank has a time limit. Collective."""
        if not self._generation.accelerator.is_main_process:
            self._generation.sync_weights()
            return
        self._num_pushes += 1
        self._versions.pop(url, None)
        with self._paused(url):
            # First, since a push that fails may also have replaced weights.
            version, set_version = f"{self._run}-{self._num_pushes}", self._servers.by_url(url).set_version
            is_set = run_coroutine(self._ask(url, set_version, version, "failed before the weights were pushed"))
            call_within(
                PUSH_LIMIT_S,
                functools.partial(self._push_through_client, url),
                f"pushing the weights to the vLLM server at {url} did not finish within {PUSH_LIMIT_S:g} s: the server "
                "hangs, its process has ended, or the network to it is blocked (vllm_group_port); the last checkpoint "
                "is intact",
                self._generation.accelerator.device,
            )
            self._versions[url] = version if is_set else None

    @contextlib.contextmanager
    def _paused(self, url: str) -> Generator[None]:
        """Pause a server inside the block if requests may be open; they continue with the new weights.

        Its cache is cleared, so that these requests are prefilled again: with keys and values from the old weights, the
        log-probabilities would match neither version.
        """
        if not self._pauses:
            yield
            return
        if not run_coroutine(self._switch(url, "pause?mode=keep&clear_cache=true")):
            raise ConfigError(
                f"the vLLM server at {url} cannot pause, which max_staleness > 0 requires to push weights while it "
                "generates: start it with VLLM_SERVER_DEV_MODE=1"
            )
        try:
            yield
        except BaseException:
            try:
                run_coroutine(self._switch(url, "resume"))
            except AgentsGymError as error:  # the error of the push has more detail
                logger.warning("%s", sentence_of(error))
            raise
        run_coroutine(self._switch(url, "resume"))

    async def _switch(self, url: str, command: str) -> bool:
        switch = self._servers.by_url(url).switch
        return await self._ask(url, switch, command, f"failed to {command.partition('?')[0]}")

    def _push_through_client(self, url: str) -> None:
        """Push the weights through TRL's client for the server, which is created here unless TRL has created it."""
        device = self._generation.accelerator.device
        try:
            if url not in self._clients:
                client = self._generation.vllm_client
                index = [server.url for server in self._servers.servers].index(url)
                if index:
                    port, limit_s = self._generation.group_port + index, self._generation.server_timeout
                    client = type(client)(base_url=url, group_port=port, connection_timeout=limit_s)
                    client.init_communicator(device=device)
                # Limit the client's requests, without retries: a thread that hangs in one would keep the process alive.
                client.session.request = functools.partial(client.session.request, timeout=PUSH_LIMIT_S)
                adapter = client.session.get_adapter(client.base_url)
                adapter.max_retries = adapter.max_retries.new(read=0)
                self._clients[url] = client
            client = self._clients[url]
            if url in self._reconnect:
                client.close_communicator()
                client.init_communicator(device=device)
                self._reconnect.discard(url)
            self._generation.vllm_client = client
            self._generation.sync_weights()
        except Exception as error:
            raise AgentsGymError(
                f"the weights could not be pushed to the vLLM server at {url}: {type(error).__name__}: "
                f"{sentence_of(error)}; check the server's log, and that it serves the model being trained"
            ) from error

    async def _ask(self, url: str, method: Callable[..., Awaitable[Any]], argument: str, failed: str) -> Any:
        """Call a method of a server; ``failed`` is the beginning of the message of an error."""
        async with open_session(1) as session:
            try:
                return await method(session, argument)
            except TransientError as error:
                raise AgentsGymError(f"the vLLM server at {url} {failed}: {error}") from error


def call_within(limit_s: float, call: Callable[[], None], too_late: str, device: torch.device) -> None:
    """Make an uninterruptible call on a thread, which is abandoned after ``limit_s`` seconds."""
    outcome: Future[None] = Future()
    stream: Any = None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def run() -> None:
        try:
            if stream is not None:
                torch.accelerator.set_stream(stream)  # this also selects the device, which differs between threads
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001  # raised on the thread that waits
            outcome.set_exception(error)

    threading.Thread(target=run, name="agentsgym-push", daemon=True).start()
    try:
        outcome.result(limit_s)
    except TimeoutError:
        if outcome.done():
            raise  # the call's own error
        logger.error("%s", too_late)  # noqa: TRY400  # it has no traceback to show
        raise AgentsGymError(too_late) from None
