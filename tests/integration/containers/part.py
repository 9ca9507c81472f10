"""One part of a mesh in its own container."""

from __future__ import annotations

import signal


class ContainerPart:
    """A container that keeps its name and its address however often it is started."""

    name: str
    address: str

    @property
    def is_running(self) -> bool:
        """Started and not ended by us; it may have ended by itself."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the container; does not wait until it serves. Blocks for some 0.3 s."""
        raise NotImplementedError

    async def end(self, sig: signal.Signals = signal.SIGKILL) -> int:
        """Send `sig` to its first process and wait for its end (45 s at most). Return the exit status."""
        raise NotImplementedError

    def tail(self, lines: int = 15) -> str:
        """Return the last lines of its log."""
        raise NotImplementedError
