"""What the clients on grpcio share: channels from commands, and answers on stdout. See tests/clients/driver.py."""

from __future__ import annotations

import base64
import json
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc


def options(command: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the options of a channel: connections of its own, and the name that the server's certificate must have."""
    made: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1)]
    if command["tls"]:
        made.append(("grpc.ssl_target_name_override", command["tls"]["name"]))
    return made


def credentials(command: dict[str, Any]) -> grpc.ChannelCredentials | None:
    """Return the credentials of a channel; None: no TLS."""
    tls = command["tls"]
    if not tls:
        return None
    key, certificate = (
        Path(tls[name]).read_bytes() if tls[name] else None for name in ("key", "certificate")
    )
    return grpc.ssl_channel_credentials(Path(tls["authority"]).read_bytes(), key, certificate)


class Record:
    """The messages and the end of one call."""

    def __init__(self, command: dict[str, Any]) -> None:
        self._is_brief = command["is_brief"]
        self._messages: list[str] = []
        self.message_count = 0
        self._gap_s = 0.0
        self._last_s = 0.0

    def take(self, message: bytes) -> None:
        """Note a message."""
        now_s = time.monotonic()
        if self.message_count:
            self._gap_s = max(self._gap_s, now_s - self._last_s)
        self._last_s = now_s
        self.message_count += 1
        if not self._is_brief:
            self._messages.append(base64.b64encode(message).decode())

    def end(
        self, code: grpc.StatusCode, details: str | None, trailers: Iterable[tuple[str, Any]] | None
    ) -> dict[str, Any]:
        """Return the outcome."""
        return {
            "code": code.value[0],
            "details": details or "",
            "messages": self._messages,
            "trailers": {
                key: base64.b64encode(value).decode() if isinstance(value, bytes) else value
                for key, value in trailers or ()
            },
            "message_count": self.message_count,
            "gap_s": self._gap_s,
        }


_lock = threading.Lock()


def say(number: int, **fields: Any) -> None:
    """Write one answer."""
    line = json.dumps({"id": number, **fields}) + "\n"
    with _lock:
        sys.stdout.write(line)
        sys.stdout.flush()
