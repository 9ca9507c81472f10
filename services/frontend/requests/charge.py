"""Output tokens that an execution is charged, by its end and the reach of its output (decision 0021).

Pure. INVARIANT: handed <= produced <= computed. A message is handed to the transport whole. Its bytes may be under way
before the transport reports the message as written. The charge of a client that leaves therefore counts each message that
the transport was given. It exceeds the output that left the process by at most one message: one flow-control window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CLOSED_S: Final = 2.0
"""A transport that holds one message longer than this belongs to a client with a closed flow-control window. The engine
does not wait for the client, so such a client pays for all tokens that the engine computes."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Reach of an execution's output, as positions from the request's beginning."""

    handed: int
    """Positions [0, handed) were given to the client's transport."""
    produced: int
    """Positions [0, produced) reached the frontend."""
    computed: int
    """Positions [0, computed) were computed by an engine, as far as the frontend knows."""
    closed_s: float = 0.0
    """Seconds that the transport had held one message at the request's end, or when its client left. 0: no message.

    Time in which this process stood still does not count.
    """


def output_tokens(reach: Reach, *, is_complete: bool, is_slow_reader: bool, is_ours: bool) -> int:
    """Return the output tokens to charge: those handed to the transport, unless a later rule says otherwise.

    `is_complete`: the request ended well, which charges all produced tokens. `is_slow_reader`: the request ended because
    its reader was slow, which charges all computed tokens, as does a window closed for CLOSED_S. `is_ours`: the mesh
    failed the request, which charges the handed tokens in any case.
    """
    if is_ours:
        return reach.handed
    if is_slow_reader or reach.closed_s > CLOSED_S:
        return max(reach.computed, reach.produced)
    return reach.produced if is_complete else reach.handed
