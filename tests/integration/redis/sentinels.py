"""A master, a replica and three sentinels as real processes, on one loopback address."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import redis
import redis.asyncio
from redis.exceptions import RedisError

from kvmesh.child import bound_command
from kvmesh.ports import free_ports
from tests.patience import patience

HOST: Final = "127.0.0.1"
SERVICE: Final = "mesh-master"
DOWN_AFTER_MS: Final = 800
"""The sentinels take the master for dead after this time. Less, and they would also do so on a busy machine."""

SENTINEL_RIGHTS: Final = "+auth +sentinel|get-master-addr-by-name"
"""The rights of the mesh's user of the sentinels in docs/security.md. With a password, the user "asker" has them."""

NEVER_MS: Final = 600_000
"""For tests without a failover."""

START_S_MAX: Final = 15.0


@dataclass
class Server:
    """One redis-server: a Redis or a sentinel."""

    port: int
    command: Sequence[str]
    log: Path
    password: str = ""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def start(self) -> None:
        """Start the process, without waiting until it is ready."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(bound_command(self.command), stdout=log, stderr=log)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End the process. It may have ended, or may be frozen."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    async def ask(self, *command: str | int) -> Any:
        """Return the answer to one command."""
        client = redis.asyncio.Redis(
            host=HOST, port=self.port, password=self.password or None, socket_timeout=5
        )
        try:
            return await client.execute_command(*command)  # type: ignore[no-untyped-call]  # the library left it out
        finally:
            await client.aclose()

    async def reaches(self, text: str, *command: str | int, bound_s: float = START_S_MAX) -> None:
        """Wait until the answer to `command` contains `text`."""
        seen: Any = None
        try:
            async with patience(bound_s):
                while True:
                    with suppress(RedisError, OSError):
                        seen = await self.ask(*command)
                        if text in str(seen):
                            return
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{self.address}: {command} is {seen!r}\n{self.log.read_text()}") from None


class SentinelSet:
    """`data` is the first master and its replica, `sentinels` are three."""

    def __init__(
        self,
        binary: Path,
        folder: Path,
        *,
        password: str = "",
        sentinel_password: str = "",
        down_after_ms: int = DOWN_AFTER_MS,
    ) -> None:
        self.password = password
        self.sentinel_password = sentinel_password
        self._down_after_ms = down_after_ms
        self._binary, self._folder = binary, folder
        ports = list(free_ports(HOST, 5))
        self.data = [self._data(port, ports[0]) for port in ports[:2]]
        self.sentinels = [self._sentinel(index, ports) for index in range(2, 5)]

    @property
    def url(self) -> str:
        """The URL for kvmesh, with the passwords."""
        return self.url_of(self.sentinels)

    def url_of(self, sentinels: Sequence[Server], service: str = SERVICE) -> str:
        """Return the URL for kvmesh that names `sentinels`."""
        login = f":{self.password}@" if self.password else ""
        option = f"?sentinel_password={self.sentinel_password}" if self.sentinel_password else ""
        return f"redis+sentinel://{login}{','.join(each.address for each in sentinels)}/{service}{option}"

    async def start(self) -> None:
        """Start all processes, and wait until a failover is possible."""
        master, replica = self.data
        master.start()
        await master.reaches("PONG", "ECHO", "PONG")
        replica.start()
        await replica.reaches("'master_link_status': 'up'", "INFO", "replication")
        for server in self.sentinels:
            server.start()
        await asyncio.gather(
            *(each.reaches("OK 3 usable", "SENTINEL", "CKQUORUM", SERVICE) for each in self.sentinels)
        )
        await asyncio.gather(
            *(each.reaches("'slaves': 1, 'sentinels': 3", "INFO", "sentinel") for each in self.sentinels)
        )

    def extra_sentinel(self, master: int) -> Server:
        """Return a sentinel alone, not started, that takes the Redis at port `master` for the master."""
        (port,) = free_ports(HOST, 1)
        return self._server_of(port, [f"sentinel monitor {SERVICE} {HOST} {master} 1"])

    def stop(self) -> None:
        """End all processes."""
        for server in (*self.sentinels, *self.data):
            server.kill()

    def _data(self, port: int, master: int) -> Server:
        command = [str(self._binary), "--port", str(port), "--bind", HOST, "--dir", str(self._folder)]
        command += ["--save", "", "--appendonly", "no", "--repl-diskless-sync", "no"]
        if self.password:
            command += ["--requirepass", self.password, "--masterauth", self.password]
        if port != master:
            command += ["--replicaof", HOST, str(master)]
        return Server(port, command, self._folder / f"redis-{port}.log", self.password)

    def _sentinel(self, index: int, ports: Sequence[int]) -> Server:
        """Return a sentinel that knows the replica and the other sentinels at its start. It would find them in seconds."""
        master, replica, port = ports[0], ports[1], ports[index]
        others = (each for each in ports[2:] if each != port)
        return self._server_of(
            port,
            [
                f"sentinel monitor {SERVICE} {HOST} {master} 2",
                f"sentinel down-after-milliseconds {SERVICE} {self._down_after_ms}",
                f"sentinel failover-timeout {SERVICE} 3000",
                f"sentinel known-replica {SERVICE} {HOST} {replica}",
                *(f"sentinel known-sentinel {SERVICE} {HOST} {each} {each:040x}" for each in others),
            ],
        )

    def _server_of(self, port: int, lines: list[str]) -> Server:
        """Return a sentinel whose configuration has `lines`."""
        lines = [f"port {port}", f"bind {HOST}", f"dir {self._folder}", f"sentinel myid {port:040x}", *lines]
        if self.password:
            lines.append(f"sentinel auth-pass {SERVICE} {self.password}")
        if self.sentinel_password:
            lines.append(f"requirepass {self.sentinel_password}")
            lines.append(f"user asker on >{self.sentinel_password} -@all {SENTINEL_RIGHTS}")
        path = self._folder / f"sentinel-{port}.conf"
        path.write_text("\n".join(lines) + "\n")
        command = [str(self._binary), str(path), "--sentinel"]
        return Server(port, command, self._folder / f"sentinel-{port}.log", self.sentinel_password)
