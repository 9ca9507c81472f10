"""Idle and slow connections (slowloris): to a frontend, to metrics ports, in the middle of a TLS handshake."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from kvmesh.config import describe
from tests.abuse.attack import Attack, Bounds, Dose, Outcome, merged
from tests.abuse.target import FRONT, SERVICES, Target
from tests.certificates import Folder
from tests.integration.harness import START_S_MAX, Part, beside, until
from tests.raw_frames import PREFACE

AT_ONCE = 100
"""Connections that are opened at the same time; more would overflow the kernel's backlog and not reach the mesh."""

IDLE_PEAK_MB = 320.0
"""10,000 connections take 19 KB each, beside some 90 MB of the process."""
IDLE_AFTER_MB = 80.0
"""Freed memory is in pieces, which later connections take again: a third such attack added 2 MB."""

FIRST_WORDS = PREFACE + b"\0\0\0\4\0\0\0\0\0"
ACKNOWLEDGEMENT = b"\0\0\0\4\1\0\0\0\0"
"""The frame that acknowledges the peer's SETTINGS."""

CLIENT_HELLO_START = bytes.fromhex("1603010200010001fc0303")
"""TLS record of 512 bytes, handshake of 508 bytes, version; the rest is missing."""


async def idle(target: Target, dose: Dose) -> Outcome:
    """Open connections. A third is ready for calls, a third sends HTTP/2's preface alone, a third is silent."""
    return await hold(target.address(FRONT), [FIRST_WORDS + ACKNOWLEDGEMENT, FIRST_WORDS, b""], dose)


async def metrics(target: Target, dose: Dose) -> Outcome:
    """Request metrics of each role repeatedly, with half requests and endless lines."""
    kinds = [
        b"GET /metrics HTTP/1.0\r\nHost: a\r\n",
        b"",
        b"G" * 60_000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 200,
    ]
    share = Dose(dose.count // len(SERVICES), dose.seconds)
    outcomes = await asyncio.gather(
        *(hold(target.rig.metrics_address(name), kinds, share) for name in SERVICES)
    )
    return merged(outcomes)


async def handshakes(target: Target, dose: Dose) -> Outcome:
    """Stop in the middle of TLS handshakes with a frontend that has a certificate; it must keep running."""
    folder = Path(target.mesh.folder) / "tls"
    folder.mkdir(exist_ok=True)
    files = Folder(folder, roles=["frontend"]).files("frontend")
    config = target.mesh.config
    shown = msgspec.structs.replace(config.frontend, certificate=files.certificate, key=files.key)
    (folder / "kvmesh.toml").write_text(describe(msgspec.structs.replace(config, frontend=shown)))
    options = {
        "--config": str(folder / "kvmesh.toml"),
        "--id": "frontend-tls",
        "--listen": f"{config.mesh.host}:0",
    }
    command = beside(target.mesh.parts[FRONT].command, options)
    part = Part("frontend-tls", command, "", folder / "frontend-tls.log")
    part.start()
    try:
        await until(lambda: _address(part) != "", START_S_MAX, "the frontend with a certificate is ready")
        outcome = await hold(_address(part), [CLIENT_HELLO_START, CLIENT_HELLO_START[:3], b""], dose)
        if part.has_fallen:
            outcome.violations.append(f"the frontend with a certificate ended: {part.tail()[-300:]}")
    finally:
        await part.end()
    return outcome


def _address(part: Part) -> str:
    for line in part.log.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith('{"ready"'):
            return str(msgspec.json.decode(line)["address"])
    return ""


async def hold(address: str, first_words: list[bytes], dose: Dose) -> Outcome:
    """Hold `dose.count` connections until the dose's time is over; a closed one is not opened again."""
    outcome = Outcome()
    until_s = time.monotonic() + dose.seconds
    gate = asyncio.Semaphore(AT_ONCE)
    host, _, port = address.rpartition(":")

    async def one(words: bytes) -> None:
        try:
            async with gate, asyncio.timeout(10):
                reader, writer = await asyncio.open_connection(host, int(port))
        except (OSError, TimeoutError):
            outcome.saw["not connected"] += 1
            return
        outcome.did["connections"] += 1
        try:
            with suppress(OSError):
                writer.write(words)
                await writer.drain()
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + until_s - time.monotonic()):
                    while await reader.read(1 << 16):
                        pass
                outcome.saw["closed"] += 1
            except TimeoutError:
                outcome.saw["open"] += 1
            except OSError:
                outcome.saw["closed"] += 1
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    async with asyncio.TaskGroup() as group:
        for number in range(dose.count):
            group.create_task(one(first_words[number % len(first_words)]))
    return outcome


IDLE = Attack(
    name="idle-connections",
    about="Idle connections to a frontend: silent, with HTTP/2's preface, or with the preface and an acknowledgement",
    run=idle,
    long=Dose(10_000, 30.0),
    short=Dose(300, 1.0),
    bounds=Bounds(peak_mb=IDLE_PEAK_MB, after_mb=IDLE_AFTER_MB),
)
METRICS = Attack(
    name="metrics-ports",
    about="Connections to metrics ports: half requests, endless lines, junk, silence",
    run=metrics,
    long=Dose(4_000, 10.0),
    short=Dose(200, 1.0),
)
HANDSHAKES = Attack(
    name="tls-handshakes",
    about="Handshakes of TLS with a frontend's certificate that stop in the middle",
    run=handshakes,
    long=Dose(1_000, 10.0),
    short=None,
)
