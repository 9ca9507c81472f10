"""Names of enum values that a peer sent. Pure."""

from __future__ import annotations

from typing import Any, Final

UNKNOWN: Final = "UNKNOWN"


def name_of(kind: Any, number: int) -> str:
    """Return the name of `number` in the generated enum `kind`; UNKNOWN for a number of a newer peer.

    Enums only grow, and replicas are upgraded one by one. So an unknown number is no error. All unknown numbers share one
    name, because names become labels of metrics, and the cardinality of labels is bounded.
    """
    value = kind.DESCRIPTOR.values_by_number.get(number)
    return UNKNOWN if value is None else str(value.name)
