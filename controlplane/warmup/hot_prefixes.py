"""Asks the routers of a pool for their hot prefixes, as a caller of the role `control`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from controlplane.warmup.hot_record import AnswerRefused, HotRecord, RouterAnswer, merged
from kvmesh.attach.dialing import Dialer, DialRefused, PeerUnreachable
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.router.v1 import router_pb2_grpc
from kvmesh.tasks import end

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 3.0
"""Longest wait for all answers. A router sends its heaviest prefixes first, so that a part of an answer is of use."""

BYTES_MAX: Final = 64 << 20
"""Bound on the bytes of all answers together. Each router has an equal share."""

PART_BYTES_MAX: Final = 2 << 20
"""Longest message that a caller should let its channels take. A part has at most 1 MiB."""

REASON_CHARACTERS_MAX: Final = 200
"""Longest reason in the log: a router chooses the text."""


async def collect(
    routers: Sequence[tuple[str, str]],
    open_channel: Callable[[str, str], grpc.aio.Channel],
    *,
    model_version: str,
    block_tokens: int,
    block_count_max: int,
    tenant_count_min: int = 0,
    dialer: Dialer | None = None,
    timeout_s: float = TIMEOUT_S,
    bytes_max: int = BYTES_MAX,
    region: str = "",
) -> HotRecord:
    """Return what the `routers`, as name and address, say is hot, within `timeout_s`. Cancellation ends all calls.

    `open_channel` takes an address and the role there. `block_count_max`: distinct blocks of each router, 1 to 1,000,000.
    `tenant_count_min`: tenants that must have sent a prefix; 0 and 1: every prefix. `dialer`: None: any address.
    `region`: the own region, where the routers are of another one: prompts of tenants that may not leave are left out.

    Never raises for a router: one that fails, is too slow, or is of release 0.1.0, is in `HotRecord.incomplete`. Its parts
    until then count.
    """
    share = bytes_max // max(1, len(routers))
    answers = {name: RouterAnswer(model_version, block_tokens, share) for name, _ in routers}
    request = pb.ListHotPrefixesRequest(
        block_count_max=block_count_max, tenant_count_min=tenant_count_min, region=region
    )

    async def ask(name: str, address: str) -> None:
        try:
            resolved = address if dialer is None else await dialer.resolve(address)
            async with open_channel(resolved, "router") as channel:
                await _read(channel, request, answers[name], timeout_s)
        except (AnswerRefused, DialRefused, PeerUnreachable) as error:
            _log(name, str(error))
        except grpc.aio.AioRpcError as error:
            _log(name, f"{error.code().name}: {error.details()}"[:REASON_CHARACTERS_MAX])

    asked = [
        asyncio.create_task(ask(name, address), name=f"hot-prefixes:{name}") for name, address in routers
    ]
    try:
        if asked:
            await asyncio.wait(asked, timeout=timeout_s)
    finally:
        await end(asked)
    for task in asked:
        bug = None if task.cancelled() else task.exception()
        if bug is not None:
            log.error("bug while a router was asked for hot prefixes", exc_info=bug)
    return merged(answers)


async def _read(
    channel: grpc.aio.Channel, request: pb.ListHotPrefixesRequest, answer: RouterAnswer, timeout_s: float
) -> None:
    """Read an answer to its end, or until `answer` takes no further part."""
    stub: Any = router_pb2_grpc.RouterServiceStub(channel)
    async for part in stub.ListHotPrefixes(request, timeout=timeout_s):
        if not answer.take(part):
            return
    answer.is_complete = True


def _log(router: str, why: str) -> None:
    log.info("a router did not list its hot prefixes", extra={"router": router, "reason": why})
