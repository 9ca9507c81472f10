"""Whether an engine can pull the KV blocks of prefill engines: believed, or tried with the first handoff. Pure.

A stock model of TensorRT-LLM lists the tensors of a handoff, although it works only inside one MPI world. There the first
handoff is the trial. If it fails, the replica runs every prompt itself (aggregated serving).

The state machine:

    PROVED              the model promises it, or the first answer after a handoff came
    OPEN -> UNDER_WAY   a request that awaits a handoff was taken: its handoff is the trial
    UNDER_WAY -> OPEN   that request ended without a verdict
    UNDER_WAY -> PROVED the first answer after its handoff
    UNDER_WAY -> FAILED its handoff failed, or had no answer for TRIAL_S
    FAILED -> OPEN      another boot of this engine, a new prefill replica, or the end of the backoff
    ABSENT              the engine has no handoffs, or the configuration forbids them

The backoff begins with BACKOFF_MIN_S, and doubles with each failure up to BACKOFF_MAX_S. A new boot begins it anew.

INVARIANT: PROVED and ABSENT are final. INVARIANT: one request at a time is the trial; meanwhile the others run aggregated.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Final

from kvmesh.triton.capabilities import ModelFacts
from kvmesh.triton.errors import HANDOFF_FAULTS, CallError

log = logging.getLogger(__name__)

TRIAL_S: Final = 5.0
"""Longest time from an untried handoff to the engine's first answer. A transfer takes a fraction of a second."""

BACKOFF_MIN_S: Final = 60.0
BACKOFF_MAX_S: Final = 3600.0
"""A trial that hangs costs one user's request TRIAL_S per backoff."""


class TrialState(Enum):
    """See the module."""

    PROVED = "proved"
    OPEN = "open"
    UNDER_WAY = "under way"
    FAILED = "failed"
    ABSENT = "absent"


class HandoffTrial:
    """See the module. The methods return True if the state changed."""

    def __init__(self, facts: ModelFacts) -> None:
        if not facts.capabilities.disaggregated:
            self.state = TrialState.ABSENT
        else:
            self.state = TrialState.OPEN if facts.tries_handoffs else TrialState.PROVED
        self._request: object | None = None
        """The request that is the trial."""
        self._backoff_s = BACKOFF_MIN_S
        self.next_s: float | None = None
        """End of the backoff. None: the trial has not failed."""
        self._sources: frozenset[object] = frozenset()

    @property
    def is_aggregated(self) -> bool:
        """True if the replica runs the next prompt itself."""
        return self.state in (TrialState.UNDER_WAY, TrialState.FAILED, TrialState.ABSENT)

    def is_of(self, request: object) -> bool:
        """Return whether `request` is the trial."""
        return self._request is request

    def begin(self, request: object) -> bool:
        """Take a request that awaits a handoff. It is the trial if that is open."""
        if self.state is not TrialState.OPEN:
            return False
        self._request = request
        return self._enter(TrialState.UNDER_WAY)

    def end(self, request: object) -> bool:
        """Take the end of a request. If it was the trial and gave no verdict, the next one is."""
        if not self.is_of(request):
            return False
        self._request = None
        return self._enter(TrialState.OPEN)

    def on_pulled(self, request: object) -> bool:
        """Take the first answer after the handoff of `request`."""
        if not self.is_of(request):
            return False
        self._request = None
        return self._enter(TrialState.PROVED)

    def on_failed(self, request: object, error: CallError, now_s: float) -> bool:
        """Take the failure of the handoff of `request` without any answer."""
        if not self.is_of(request) or not isinstance(error, HANDOFF_FAULTS):
            return False
        log.warning(
            "handoffs do not work with this engine, so it runs every prompt itself (aggregated) for %g s: %s",
            self._backoff_s,
            error,
        )
        self._request = None
        self.next_s = now_s + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
        return self._enter(TrialState.FAILED)

    def on_timer(self, now_s: float) -> bool:
        """Open the trial again at the end of the backoff."""
        return self._reopen() if self.next_s is not None and self.next_s <= now_s else False

    def on_engine_lost(self) -> bool:
        """Take the loss of the engine. Its next boot is tried."""
        self._backoff_s = BACKOFF_MIN_S
        return self._reopen()

    def on_sources(self, sources: frozenset[object]) -> bool:
        """Take the prefill replicas, each with its boot. A new one is tried."""
        known, self._sources = self._sources, sources
        if not sources - known:
            return False
        self._backoff_s = BACKOFF_MIN_S
        return self._reopen()

    def _reopen(self) -> bool:
        self.next_s = None
        return self._enter(TrialState.OPEN) if self.state is TrialState.FAILED else False

    def _enter(self, state: TrialState) -> bool:
        self.state = state
        return True
