"""The core of copies: a second `FrontendCore`, with limits and links of its own. No copy is sent twice or moved. Pure.

INVARIANT: each copy has one attempt, at a router of the pool of its spec. A lost router ends its copies at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from services.frontend.requests import faults
from services.frontend.requests.core import FrontendCore, Observer
from services.frontend.requests.pool_choice import PoolChoice
from services.frontend.requests.request_spec import RequestSpec
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from services.frontend.requests.router_peers import RouterLink
from services.frontend.requests.watchdog import Watchdog

COPIES_MAX: Final = 64
"""Concurrency limit of the core. The traffic itself allows far fewer copies in flight."""


class PinnedPools(PoolChoice):
    """The pools of copies: a copy stays in the pool for which it was made."""

    def elsewhere(self, spec: RequestSpec) -> RequestSpec | None:
        """Return None: no copy leaves its pool."""
        return None

    def same_version_elsewhere(self, spec: RequestSpec) -> RequestSpec | None:
        """Return None: no copy leaves its pool."""
        return None

    def is_stale(self, spec: RequestSpec) -> bool:
        """Return False: a copy without a pool ends by itself."""
        return False


def _no_jitter() -> float:
    return 0.0


class ShadowCore(FrontendCore):
    """See the module. `watchdog`: bounds of silence, those of users' requests."""

    def __init__(
        self,
        block_tokens: int,
        observer: Observer,
        now_s: float,
        watchdog: Watchdog | None = None,
        *,
        jitter: Callable[[], float] = _no_jitter,
    ) -> None:
        super().__init__(
            Limits(1, 0.0, block_tokens, watchdog or Watchdog()),
            limit=COPIES_MAX,
            retries=RetryBudget(0.0, 0.0, now_s),
            jitter=jitter,
            observer=observer,
        )
        self.pools = PinnedPools(self.peers)

    def has_other(self, spec: RequestSpec, name: str) -> bool:
        """Return False: no other router takes a running copy over."""
        return False

    def on_lost(self, link: RouterLink, reason: str, now_s: float) -> None:
        """End the copies of a broken stream: their slots are void."""
        peer = self.peers.get(link.name)
        if peer is not None:
            copies = list(peer.slots.values())
            peer.slots.clear()
            for copy in copies:
                copy.upstream.void()
                copy.give_up(faults.ROUTER_LOST, now_s)
        super().on_lost(link, reason, now_s)
        self.on_event()
