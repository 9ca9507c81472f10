"""Attacks through the mesh's Redis: forged members, junk in streams and channels, and in every key."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import msgspec
import redis.asyncio

from kvmesh.membership.member import LEASE_S, Member
from tests.abuse.attack import Attack, Bounds, Dose, Outcome
from tests.abuse.target import Target

DIALS_PER_S: Final = 20
"""Rate limit of a process for new connections to unknown members."""

DIALS_BURST: Final = 64
"""Burst of that rate limit, in members."""

HUGE_BYTES: Final = 4 << 20
HUGE_KEYS: Final = 8
"""Keys that get a huge value at a time: Redis itself must not break."""

ROLES: Final = ("frontend", "router", "prefill", "decode")

ABSURD: Final = (
    *(
        "999.999.999.999:1",
        "127.0.0.1:0",
        "127.0.0.1:99999",
        "",
        ":",
        "unix:/etc/passwd",
        "dns:///localhost:1",
    ),
    *(
        "[::1]:1",
        "x" * 5_000,
        "\x00:\x00",
        "127.0.0.1:1\r\nX: y",
        "ipv4:127.0.0.1:1,127.0.0.1:2",
        "é:1",
        "localhost:-1",
    ),
)


async def members(target: Target, dose: Dose) -> Outcome:
    """Keep leases of processes that do not exist: a quarter at absurd addresses, the others at a listener that counts."""
    outcome = Outcome()
    mesh = target.mesh.config.mesh
    until_s = time.monotonic() + dose.seconds
    dialled: set[str] = set()

    def on_dial(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.add(writer.get_extra_info("sockname")[0])
        outcome.saw["dials"] += 1
        writer.transport.abort()

    server = await asyncio.start_server(on_dial, "0.0.0.0", 0)  # every address of 127.0.0.0/8 is this machine
    port = server.sockets[0].getsockname()[1]
    leases = {f"forged-{number}": _lease(target, number, port) for number in range(dose.count)}
    junk = {f"junk-{number}": target.rng.randbytes(200) for number in range(20)}
    names = (*leases, *junk, b"\xff\xfe", "")
    async with server, _client(target) as client:
        while time.monotonic() < until_s:
            async with client.pipeline(transaction=False) as batch:
                for name, lease in {**leases, **junk}.items():
                    batch.set(f"{mesh.name}:proc:{name}", lease, px=int(LEASE_S * 1000))
                batch.sadd(f"{mesh.name}:procs", *names)
                batch.publish(f"{mesh.name}:proc-news", target.rng.randbytes(40))
                await batch.execute()
            await asyncio.sleep(min(1.0, max(0.0, until_s - time.monotonic())))
        outcome.did["leases"] = len(leases) + len(junk)
        async with client.pipeline(transaction=False) as batch:
            for name in (*leases, *junk):
                batch.delete(f"{mesh.name}:proc:{name}")
            batch.srem(f"{mesh.name}:procs", *names)
            await batch.execute()
    outcome.saw["members dialled"] = len(dialled)
    allowed = 2 * (DIALS_BURST + DIALS_PER_S * dose.seconds)  # routers dial replicas, frontends dial routers
    if len(dialled) > allowed:
        outcome.violations.append(
            f"{len(dialled)} forged members were dialled in {dose.seconds:g} s; {allowed:g} are allowed"
        )
    await target.mesh.placeable()
    return outcome


def _lease(target: Target, number: int, port: int) -> bytes:
    """Return the lease of forged member `number`, with an address of its own."""
    engine = target.mesh.config.engine
    counted = f"127.200.{number // 250}.{number % 250 + 1}:{port}"
    return msgspec.json.encode(
        Member(
            process_id=f"forged-{number}",
            role=ROLES[number % 4],
            address=target.rng.choice(ABSURD) if number // 4 % 4 == 0 else counted,
            boot_id=f"{target.rng.getrandbits(64):016x}",
            model_version=engine.salt,
            block_tokens=engine.block_tokens,
            kv_address=target.rng.choice(ABSURD),
            capabilities=("seeded_resume", "x" * 100),
        )
    )


async def keys(target: Target, dose: Dose) -> Outcome:
    """Corrupt every key in turn, and all streams and channels; then empty Redis, and wait for the mesh to recover."""
    outcome = Outcome()
    until_s = time.monotonic() + dose.seconds
    mesh = target.mesh.config.mesh.name
    async with _client(target) as client:
        while time.monotonic() < until_s:
            for spoil in SPOILS:
                found = [key async for key in client.scan_iter(count=1000)]
                target.rng.shuffle(found)
                for key in found[:HUGE_KEYS] if spoil is _huge else found:
                    await _spoil(client, key, spoil, target.rng, outcome)
                await _publish(client, mesh, target.rng, outcome)
                await asyncio.sleep(min(1.5, dose.seconds / len(SPOILS)))
            if target.is_short:
                break
        await client.flushall()
    try:
        await target.mesh.placeable()
    except AssertionError as error:
        outcome.violations.append(f"after Redis was emptied: {' '.join(str(error).split())[:300]}")
    return outcome


async def _bytes(client: Any, key: bytes, rng: random.Random) -> None:
    await client.set(key, rng.randbytes(rng.randint(1, 300)), keepttl=True)


async def _wrong_type(client: Any, key: bytes, rng: random.Random) -> None:
    kind = await client.type(key)
    await client.delete(key)
    if kind == b"list":
        await client.hset(key, "a", "b")
    else:
        await client.rpush(key, "junk", rng.randbytes(20))
    await client.pexpire(key, 3_000)


async def _fields(client: Any, key: bytes, rng: random.Random) -> None:
    match await client.type(key):
        case b"stream":
            for _ in range(20):
                await client.xadd(
                    key, {rng.randbytes(5): rng.randbytes(500), "e": rng.randbytes(30), "r": "prefill-0"}
                )
        case b"hash":
            for field in await client.hkeys(key):
                await client.hset(key, field, rng.choice((rng.randbytes(10), b"1e400", b"-1", b"nan", b"{}")))
        case b"set":
            await client.sadd(key, *(rng.randbytes(8) for _ in range(50)))
        case b"zset":
            await client.zadd(key, {rng.randbytes(8): rng.choice((0, -1e300, 1e300)) for _ in range(20)})
        case b"string":
            await client.append(key, rng.randbytes(30))


async def _huge(client: Any, key: bytes, rng: random.Random) -> None:
    await client.set(key, rng.randbytes(1 << 10) * (HUGE_BYTES >> 10), px=2_000)


SPOILS: Final[tuple[Callable[[Any, bytes, random.Random], Awaitable[None]], ...]] = (
    _fields,
    _bytes,
    _wrong_type,
    _huge,
)


async def _spoil(
    client: Any,
    key: bytes,
    spoil: Callable[[Any, bytes, random.Random], Awaitable[None]],
    rng: random.Random,
    outcome: Outcome,
) -> None:
    with suppress(redis.ResponseError):  # the mesh writes the key at the same time
        await spoil(client, key, rng)
        outcome.did["spoilt keys"] += 1


async def _publish(client: Any, mesh: str, rng: random.Random, outcome: Outcome) -> None:
    names = {channel for channel in await client.pubsub_channels() if channel.startswith(mesh.encode())}
    for channel in names:
        for _ in range(20):
            await client.publish(channel, rng.randbytes(rng.choice((0, 8, 100, 5_000))))
            outcome.did["messages"] += 1


def _client(target: Target) -> Any:
    return redis.asyncio.Redis.from_url(target.redis_url, socket_timeout=5)


MEMBERS = Attack(
    name="forged-members",
    about="Leases in Redis of processes that do not exist, at absurd addresses and at one that counts dials",
    run=members,
    long=Dose(2_000, 15.0),
    short=Dose(400, 2.0),
)
KEYS = Attack(
    name="junk-in-redis",
    about="Junk, wrong types, absurd numbers and 4 MB values in every key of the mesh, junk in its streams and channels",
    run=keys,
    long=Dose(0, 20.0),
    short=Dose(0, 3.0),
    bounds=Bounds(answered=0.99, p99_s=5.0),
)
