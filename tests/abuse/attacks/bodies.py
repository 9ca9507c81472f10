"""Endless bodies: a prefix that announces 64 MB, then as much data as the peer's flow-control windows admit (slowloris)."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import suppress

from tests.abuse.attack import GRPC_CODES, Attack, Dose, Outcome
from tests.abuse.target import ATTACH, FRONT, GENERATE, Target
from tests.raw_frames import Metadata, framed
from tests.raw_http2 import RawConnection

ANNOUNCED_BYTES = 64 << 20
_PIECE = b"\0" * (64 << 10)


async def generate(target: Target, dose: Dose) -> Outcome:
    """Send to Generate: a third of the bodies without a key, a third with a wrong one, a third with a right one."""
    callers = itertools.cycle(target.callers().values())
    ways = [(target.address(FRONT), GENERATE, next(callers)) for _ in range(dose.count)]
    return await send_all(ways, dose)


async def attach(target: Target, dose: Dose) -> Outcome:
    """Send to the ports that services attach to."""
    addresses = itertools.cycle([target.address(name) for name in ("router-0", "prefill-0", "decode-0")])
    return await send_all([(next(addresses), ATTACH, ()) for _ in range(dose.count)], dose)


async def send_all(ways: list[tuple[str, str, Metadata]], dose: Dose) -> Outcome:
    """Send to each address and method, as the caller of its metadata, one body after the other for the dose's time."""
    outcome = Outcome()
    until_s = time.monotonic() + dose.seconds
    async with asyncio.TaskGroup() as group:
        for address, path, metadata in ways:
            group.create_task(_send(address, path, metadata, until_s, outcome))
    outcome.did["MB"] //= 1_000_000
    return outcome


async def _send(address: str, path: str, metadata: Metadata, until_s: float, outcome: Outcome) -> None:
    """Send one body after the other until `until_s`."""
    while time.monotonic() < until_s:
        outcome.did["bodies"] += 1
        with suppress(OSError, TimeoutError):
            async with RawConnection.connect(address) as connection:
                stream = connection.call(path, metadata)
                try:
                    async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                        await stream.send_data(framed(b"", length=ANNOUNCED_BYTES))
                        for _ in range(ANNOUNCED_BYTES // len(_PIECE) - 1):
                            await stream.send_data(_PIECE)
                            outcome.did["MB"] += len(_PIECE)
                            await asyncio.sleep(0)
                        await stream.ended(until_s - time.monotonic())
                finally:
                    code = None if stream.status is None else GRPC_CODES.get(stream.status, "?")
                    outcome.saw[code or ("reset" if stream.has_ended else "open")] += 1


ENDLESS = Attack(
    name="bodies",
    about="Endless bodies of 64 MB to Generate, without a key, with a wrong and with a right one",
    run=generate,
    long=Dose(120, 30.0),
    short=Dose(12, 1.5),
)
ENDLESS_ATTACH = Attack(
    name="attach-bodies",
    about="Endless bodies of 64 MB to the ports that services attach to",
    run=attach,
    long=Dose(48, 20.0),
    short=Dose(6, 1.0),
)
