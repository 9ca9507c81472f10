"""The watchdog of the server process: detects graceful shutdown and death of tritonserver.

Triton does not tell a Python model that the server stops. A stopping tritonserver closes its HTTP service first,
then waits for open responses, then finalizes the model. A long-lived subscription would delay the stop until the
exit timeout, and the server can then hang for ever (seen with 2.51). Therefore the model polls the HTTP service
and ends all requests when the service closes. The model's process exits when the server process has died.

A server that is killed may hold a lock in the memory that it shares with the model. The stub then waits for the lock with
the interpreter's own lock held, and no thread of Python runs any more. So a process of its own looks for the server as
well, and kills the model's process. Else that process would keep the KV port, and no further engine could start there.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_CHECK_S = 0.2
_MISSES = 2  # consecutive failed connections; the first may be at start, because gRPC opens before HTTP
_CONNECT_TIMEOUT_S = 1.0
# tritonserver's own exit timeout is 5 s; a server that still runs after this time hangs and is killed.
_STOP_GRACE_S = 8.0
_REAPER = 'tail -s 0.2 -f --pid="$1" /dev/null; sleep 0.5; kill -9 "$2"'
"""Shell script: waits for the end of the server, gives the model's process time to end by itself, kills it."""

_ANY = "0.0.0.0"
_FALSE = ("0", "false", "off", "no")
_SHARED_MEMORY = re.compile(r" (/dev/shm/\S+)$", re.MULTILINE)


@dataclass(slots=True)
class ServerWatchdog:
    """Calls `on_stopping` once, when the service at `http_address` ("host:port") has stopped listening.

    An empty address is that of a server without HTTP: only its death is seen, and its stop waits for its exit timeout.

    `server_pid`: process id of tritonserver, from its launcher. This process asks for no parent: a server that died before
    this process began would leave it another one, and it would wait for ever.
    """

    http_address: str
    server_pid: int
    on_stopping: Callable[[], None]
    _was_listening: bool = False

    def start_reaper(self) -> None:
        """Start the process that kills this one after the server's death, also while it loads weights or hangs."""
        subprocess.Popen(
            ["sh", "-c", _REAPER, "engine-reaper", str(self.server_pid), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def start(self) -> None:
        """Start the watchdog thread, which runs until the process ends."""
        threading.Thread(target=self._run, name="server-watchdog", daemon=True).start()

    def record_request(self) -> None:
        """Record that a request arrived: the server is up, even before the first poll."""
        self._was_listening = True

    def kill_server(self) -> None:
        """Kill the server and end this process: the death of the whole engine, as an injected fault."""
        with contextlib.suppress(OSError):
            os.kill(self.server_pid, signal.SIGKILL)
        _end()

    def _run(self) -> None:
        missed = 0
        while missed < _MISSES:
            time.sleep(_CHECK_S)
            if os.getppid() != self.server_pid:
                _end()
            if self._is_listening():
                self._was_listening, missed = True, 0
            elif self._was_listening:
                missed += 1
        threading.Thread(target=self.on_stopping, name="stopping", daemon=True).start()
        self._await_server_exit()

    def _is_listening(self) -> bool:
        """Connect and close at once; an open connection would delay the stop of the server."""
        if not self.http_address:
            return True
        host, _, port = self.http_address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # a busy server or missing file descriptors are no sign of a stop
        return True

    def _await_server_exit(self) -> None:
        deadline_s = time.monotonic() + _STOP_GRACE_S
        while os.getppid() == self.server_pid:
            if time.monotonic() > deadline_s:
                with contextlib.suppress(OSError):
                    os.kill(self.server_pid, signal.SIGKILL)
            time.sleep(_CHECK_S)
        _end()


def http_address_of(server_pid: int) -> str:
    """Return the "host:port" of the HTTP service of a tritonserver, by its command line. Empty: none, or unknown."""
    try:
        words = Path(f"/proc/{server_pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    if "tritonserver" not in Path(words[0]).name or _option(words, "allow-http", "true").lower() in _FALSE:
        return ""
    host, port = _option(words, "http-address", _ANY), _option(words, "http-port", "8000")
    if not port.isdecimal():
        return ""
    return f"{'127.0.0.1' if host in (_ANY, '::') else host}:{port}"


def _option(words: list[str], name: str, default: str) -> str:
    """Return the last value of `--name`, given as `--name=value` or `--name value`."""
    found = default
    for index, word in enumerate(words):
        if word.startswith(f"--{name}="):
            found = word.partition("=")[2]
        elif word == f"--{name}" and index + 1 < len(words):
            found = words[index + 1]
    return found


def _end() -> None:
    """Exit this process after removing the files in /dev/shm that it shares with the killed server."""
    with contextlib.suppress(OSError):
        for path in _SHARED_MEMORY.findall(Path("/proc/self/maps").read_text(encoding="utf-8")):
            Path(path).unlink(missing_ok=True)
    os._exit(1)
