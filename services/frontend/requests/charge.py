"""Output tokens that an execution is charged, by how it ended and how far its output came.

Pure. INVARIANT: handed <= produced <= computed. A message is handed to the transport whole: its bytes may be under way
although the transport has not reported it as written. So the charge of a client that leaves counts each message that the
transport was given, and exceeds what left the process by one message, which is at most one credit window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CLOSED_S: Final = 2.0
"""A transport that holds one message longer than this belongs to a client whose flow-control window is closed. The engine
goes on meanwhile, so such a client pays for what it let the engine compute."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How far the output of an execution came, as positions from the request's beginning."""

    handed: int
    """Positions [0, handed) were given to the client's transport."""
    produced: int
    """Positions [0, produced) reached the frontend."""
    computed: int
    """Positions [0, computed) were computed by an engine, as far as the frontend was told."""
    closed_s: float = 0.0
    """How long the transport had held one message when the request ended or its client left, without the time that this
    process stood still; 0: it held none."""


def output_tokens(reach: Reach, *, is_complete: bool, is_cut: bool, is_ours: bool) -> int:
    """Return the output tokens to charge.

    `is_complete`: the request ended well. `is_cut`: it ended because its reader was slow. `is_ours`: the mesh failed
    it, which is charged what was streamed, whatever the client's window was.
    """
    if is_ours:
        return reach.handed
    if is_cut or reach.closed_s > CLOSED_S:
        return max(reach.computed, reach.produced)
    return reach.produced if is_complete else reach.handed
