"""Notices that the server around the model is stopping or gone, which Triton does not tell a Python model.

A stopping tritonserver closes its HTTP service first, then waits for open responses before it finalizes the
model. A long-lived subscription would keep it waiting until its exit timeout, after which it can hang for ever
(seen with 2.51). So the model watches that service and ends everything by itself; and it ends its own process
when the server dies without a word.
"""

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_CHECK_S = 0.2
_MISSES = 2  # gRPC opens a moment before HTTP: one miss may be the start
_CONNECT_TIMEOUT_S = 1.0
# tritonserver's own exit timeout is 5 s; one that is still there after this hangs.
_STOP_GRACE_S = 8.0
_SHARED_MEMORY = re.compile(r" (/dev/shm/\S+)$", re.MULTILINE)


@dataclass(slots=True)
class ServerWatchdog:
    """Calls `on_stopping` once when the service at `http_address` ("host:port") was there and is no more."""

    http_address: str
    on_stopping: Callable[[], None]
    _parent: int = field(default_factory=os.getppid)
    _was_listening: bool = False

    def start(self) -> None:
        """Start the watching thread; it ends with the process."""
        threading.Thread(target=self._run, name="server-watchdog", daemon=True).start()

    def record_request(self) -> None:
        """A request arrived, so the server is up even if nobody has looked yet."""
        self._was_listening = True

    def _run(self) -> None:
        missed = 0
        while missed < _MISSES:
            time.sleep(_CHECK_S)
            if os.getppid() != self._parent:
                _end()
            if self._is_listening():
                self._was_listening, missed = True, 0
            elif self._was_listening:
                missed += 1
        threading.Thread(target=self.on_stopping, name="stopping", daemon=True).start()
        self._await_server_exit()

    def _is_listening(self) -> bool:
        """Connect and leave at once: a connection that stays would itself keep the server waiting."""
        host, _, port = self.http_address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # busy, out of descriptors: not a sign of stopping
        return True

    def _await_server_exit(self) -> None:
        deadline_s = time.monotonic() + _STOP_GRACE_S
        while os.getppid() == self._parent:
            if time.monotonic() > deadline_s:
                with contextlib.suppress(OSError):
                    os.kill(self._parent, signal.SIGKILL)
            time.sleep(_CHECK_S)
        _end()


def _end() -> None:
    """End this process. A server that was killed leaves the files in /dev/shm that it shares with us: remove them."""
    with contextlib.suppress(OSError):
        for path in _SHARED_MEMORY.findall(Path("/proc/self/maps").read_text(encoding="utf-8")):
            Path(path).unlink(missing_ok=True)
    os._exit(1)
