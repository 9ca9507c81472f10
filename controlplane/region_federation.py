"""The streams of a leader to the control planes of the other regions, and what they write into the own Redis. Effects only.

Written are the secrets of resume tokens, and operators' overrides of tenants.

Each other region has one task. It walks the configured addresses of that region until a process answers that it leads. Only
a leader whose takeover is over dials. The other region dials too; each of the two streams alone would carry all news.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc

from controlplane.loop import ControlLoop
from controlplane.region_control import RegionControl
from controlplane.region_service import SILENCE_S
from controlplane.regions.news import SECRET_BYTES, NewsError, of_message, to_message
from kvmesh.clock import Clock
from kvmesh.control.v1 import region_pb2 as pb
from kvmesh.control.v1 import region_pb2_grpc
from kvmesh.redis_link import RedisLink, RedisUnavailable, key
from kvmesh.snapshot.watch import Dial
from kvmesh.tasks import persist
from kvmesh.tenants.store import read_overrides, restore

log = logging.getLogger(__name__)

RETRY_S: Final = 1.0
"""Time between two dials of one region."""

HELLO_S: Final = 2.0
"""A process that does not answer within this time is passed over."""

REDIS_S: Final = 2.0
"""Time between two looks at the secrets and the overrides in Redis."""

Stream = grpc.aio.StreamStreamCall[pb.FederateRequest, pb.FederateResponse]


class RegionFederation:
    """See the module. The tasks of `background` own it."""

    def __init__(
        self,
        loop: ControlLoop,
        regions: RegionControl,
        addresses: Mapping[str, Sequence[str]],
        dial: Dial,
        redis: RedisLink,
        mesh: str,
        clock: Clock,
    ) -> None:
        """`addresses`: control processes of each other region."""
        self._loop = loop
        self._regions = regions
        self._addresses = addresses
        self._dial = dial
        self._redis = redis
        self._mesh = mesh
        self._clock = clock
        self._logged: dict[str, str] = {}
        self._own_secret = b""

    def background(self) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the tasks, with their names."""
        for region, addresses in self._addresses.items():
            name = f"region-{region}"
            yield name, persist(lambda r=region, a=addresses: self._keep(r, a), name, pause_s=RETRY_S)  # type: ignore[misc]  # mypy infers no lambda with defaults
        yield "region-redis", persist(self._keep_redis, "region-redis", pause_s=REDIS_S)

    async def _keep(self, region: str, addresses: Sequence[str]) -> None:
        at = 0
        while True:
            if self._loop.core.leads and self._regions.is_begun:
                address = addresses[at % len(addresses)]
                reason = await self._try(address)
                if self._logged.get(region) != reason[:100]:
                    self._logged[region] = reason[:100]
                    log.warning("no stream to region %s at %s: %s", region, address, reason[:300])
                at += 1
            await asyncio.sleep(RETRY_S)

    async def _try(self, address: str) -> str:
        """Serve one stream, and return why it ended. No answer of a peer raises."""
        try:
            return await self._serve(address)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except Exception as error:  # noqa: BLE001  # a foreign process must not end this task
            return f"{type(error).__name__}: {error}"

    async def _serve(self, address: str) -> str:
        channel = await self._dial(address)
        tasks: list[asyncio.Task[str]] = []
        call: Stream | None = None
        try:
            call = region_pb2_grpc.RegionServiceStub(channel).Federate()  # type: ignore[call-arg]  # stubs lack the writing form
            tasks = [
                asyncio.create_task(self._read(call), name="federate-read"),
                asyncio.create_task(self._write(call), name="federate-write"),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            if call is not None:
                call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await channel.close(None)
            tasks.clear()  # the error of a task refers to this frame, which would keep the channel open

    async def _read(self, call: Stream) -> str:
        wait_s = HELLO_S
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    message = await call.read()
            except TimeoutError:
                return f"it sent nothing for {wait_s:g} s"
            if not isinstance(message, pb.FederateResponse):
                return f"{(await call.code()).name}: {await call.details()}"
            if message.HasField("is_leader") and not message.is_leader:
                return "it does not lead"
            wait_s = SILENCE_S
            if message.HasField("news"):
                try:
                    news = of_message(message.news)
                except NewsError as error:
                    return f"its news are refused: {error}"
                self._logged.pop(news.region, None)
                self._loop.core.on_region_news(news, self._clock.now_s())
                self._loop.touch()

    async def _write(self, call: Stream) -> str:
        while self._loop.core.leads:
            news = self._regions.news(self._loop.core.leadership.term.number, self._clock.now_s())
            try:
                async with asyncio.timeout(SILENCE_S):
                    await call.write(pb.FederateRequest(news=to_message(news)))
            except TimeoutError:
                return f"it took nothing for {SILENCE_S:g} s"
            await asyncio.sleep(self._regions.settings.signals_every_s)
        return "this process does not lead any more"

    # Redis. Secrets are never in a snapshot: every role may read one.

    async def _keep_redis(self) -> None:
        while True:
            if self._loop.core.leads:
                with suppress(RedisUnavailable):
                    await self._exchange_secrets()
                    await self._exchange_overrides()
            await asyncio.sleep(REDIS_S)

    async def _exchange_overrides(self) -> None:
        exchange = self._regions.overrides
        found, _ = await read_overrides(self._redis, self._mesh)
        exchange.set_own(found)
        if learnt := exchange.learnt():
            log.info("overrides of tenants of another region", extra={"changed": sorted(learnt)[:20]})
            await restore(self._redis, self._mesh, learnt)

    async def _exchange_secrets(self) -> None:
        own = await self._redis.execute("GET", key(self._mesh, "resume-secret"))
        if isinstance(own, bytes) and len(own) == SECRET_BYTES and own != self._own_secret:
            former = (self._own_secret,) if self._own_secret else ()
            self._own_secret = own
            self._regions.set_own_secrets((own, *former))
        for region, secrets in self._regions.secrets.items():
            if region != self._regions.own:
                await self._redis.execute("SET", key(self._mesh, "resume-secret", region), b"".join(secrets))
