"""Whether an engine can pull the KV blocks of prefill engines: believed, or tried with the first handoff. Pure.

A stock model of TensorRT-LLM lists the tensors of a handoff, although it works only inside one MPI world. There the first
handoff is the trial. If it fails, the replica runs every prompt itself (aggregated serving).

The state machine:

    PROVED              the model promises it, or the first answer after a handoff came
    OPEN -> PROVED      the first answer after a handoff
    OPEN -> FAILED      a handoff failed, or had no answer for TRIAL_S
    FAILED -> OPEN      another boot of this engine, or a new prefill replica
    ABSENT              the engine has no handoffs, or the configuration forbids them

INVARIANT: PROVED and ABSENT are final.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Final

from kvmesh.triton.capabilities import ModelFacts
from kvmesh.triton.errors import CallError, EngineError, EngineStalled, HandoffLost

log = logging.getLogger(__name__)

TRIAL_S: Final = 5.0
"""Longest time from an untried handoff to the engine's first answer. A transfer takes a fraction of a second."""

_FAILURES: Final = (HandoffLost, EngineError, EngineStalled)
"""Errors that fail a trial. A lost engine or a request that is wrong says nothing about its handoffs."""


class TrialState(Enum):
    """See the module."""

    PROVED = "proved"
    OPEN = "open"
    FAILED = "failed"
    ABSENT = "absent"


class HandoffTrial:
    """See the module. The methods return True if the state changed."""

    def __init__(self, facts: ModelFacts) -> None:
        if not facts.capabilities.disaggregated:
            self.state = TrialState.ABSENT
        else:
            self.state = TrialState.OPEN if facts.tries_handoffs else TrialState.PROVED
        self._sources: frozenset[object] = frozenset()

    @property
    def is_open(self) -> bool:
        """True while the next handoff is the trial."""
        return self.state is TrialState.OPEN

    @property
    def is_aggregated(self) -> bool:
        """True if the replica runs every prompt itself."""
        return self.state in (TrialState.FAILED, TrialState.ABSENT)

    def on_pulled(self) -> bool:
        """Take the first answer after a handoff."""
        return self._enter(TrialState.PROVED) if self.is_open else False

    def on_failed(self, error: CallError) -> bool:
        """Take the failure of a handoff without any answer."""
        if not self.is_open or not isinstance(error, _FAILURES):
            return False
        log.warning(
            "handoffs do not work with this engine, so it runs every prompt itself (aggregated): %s", error
        )
        return self._enter(TrialState.FAILED)

    def on_engine_lost(self) -> bool:
        """Take the loss of the engine. Its next boot is tried again."""
        return self._reopen()

    def on_sources(self, sources: frozenset[object]) -> bool:
        """Take the prefill replicas, each with its boot. A new one is tried."""
        known, self._sources = self._sources, sources
        return self._reopen() if sources - known else False

    def _reopen(self) -> bool:
        return self._enter(TrialState.OPEN) if self.state is TrialState.FAILED else False

    def _enter(self, state: TrialState) -> bool:
        self.state = state
        return True
