"""What a live request needs of the frontend around it.

Pure: an interface; the core implements it, and a test may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from services.frontend.requests.router_peers import Peer

if TYPE_CHECKING:
    from services.frontend.requests.closed_windows import ClosedWindows
    from services.frontend.requests.request import LiveRequest
    from services.frontend.requests.verdicts import Verdict, Verdicts


class Hub(Protocol):
    """What a request needs of the frontend around it."""

    def choose(self, affinity: str, avoid: str = "") -> Peer | None:
        """Return a router that is up."""
        ...

    def has_other(self, name: str) -> bool:
        """True if a router other than `name` is up."""
        ...

    def await_router(self, request: LiveRequest) -> None:
        """Call `on_router_up` of `request` when a router comes up. Once; may be asked again."""
        ...

    def schedule(self, request: LiveRequest) -> None:
        """Look at `request.wake_s` again."""
        ...

    closed_windows: ClosedWindows
    """Which clients' windows are closed, and until when they were watched."""

    verdicts: Verdicts
    """What became of the verdicts of replicas."""

    def take_spare_retry(self, now_s: float) -> bool:
        """Spend one retry, if more than half of the budget is there. False: a verdict is not tested."""
        ...

    def contradict(self, verdict: Verdict, now_s: float) -> None:
        """Tell all routers that another replica served what `verdict` called invalid."""
        ...

    def take_retry(self, request: LiveRequest, now_s: float) -> bool:
        """Spend one retry of the budget for `request`. False: it must not be sent again."""
        ...

    def jitter(self) -> float:
        """Return a random number in [0, 1)."""
        ...

    def on_end(self, request: LiveRequest, now_s: float) -> None:
        """The client's side ended; `request.end` is set."""
        ...

    def forget(self, request: LiveRequest) -> None:
        """Nothing is left of the request anywhere. The last call."""
        ...
