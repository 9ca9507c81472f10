"""The states of a replica's life as messages of the control plane have them. Pure."""

from __future__ import annotations

from typing import Final

from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState

_NUMBERS: Final = {state: pb.ReplicaState.Value(f"REPLICA_STATE_{state.name}") for state in LifeState}
_STATES: Final = {number: state for state, number in _NUMBERS.items()}


def number_of(state: LifeState) -> pb.ReplicaState.ValueType:
    """Return the number of `state` in messages."""
    return _NUMBERS[state]


def state_of(number: pb.ReplicaState.ValueType) -> LifeState:
    """Return the state of a message. No state, and one of a later release, count as SERVING."""
    return _STATES.get(number, LifeState.SERVING)
