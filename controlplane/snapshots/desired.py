"""The desired document: what operators asked for beside rollouts. Pure.

It stands in Redis, in the memory and in the state folder of each control process. The highest revision counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from controlplane.regions.document import RegionOrders
from controlplane.shadow.order import ShadowOrder
from kvmesh.snapshot.content import ENDED_MAX, Cordon

CORDON_REASON_MAX: Final = 200
"""Longest reason, in characters."""


class CordonEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One process that is out of use."""

    process_id: str
    boot_id: str = ""
    """Empty: every boot."""
    draining: bool = False
    reason: str = ""
    by: str = ""
    at_s: float = 0.0
    """Unix time of the command."""


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. Unknown keys are ignored, because a later release may write more."""

    revision: int = 0
    stable_pool: str = ""
    """The pool that an operator made stable. Empty: the one of the snapshot in force."""
    stable_after: str = ""
    """The last rollout before that command. A later rollout decides anew."""
    stable_revision: int = 0
    """Revision of this document with that command. A snapshot with this number, or a later one, follows it already: what
    it has now was decided afterwards, also if the documents of that decision are lost.
    """
    cordons: tuple[CordonEntry, ...] = ()
    frozen_until_s: float = 0.0
    """Unix time of the end of the freeze; 0: none."""
    ended_rollouts: tuple[str, ...] = ()
    """Rollouts that were taken back, the latest last."""
    shadow: ShadowOrder | None = None
    """The shadow that runs. None: there is none."""
    regions: RegionOrders = RegionOrders()
    """Declarations of regions and orders to avoid one. A leader of a release without regions drops them; peers give the
    declarations back."""

    def is_frozen(self, wall_s: float) -> bool:
        """True while no step forward is allowed."""
        return wall_s < self.frozen_until_s

    def stable_pool_after(self, rollout: str, followed: int) -> str:
        """Return the pool that an operator made stable since `rollout`, the last one; empty: none.

        `followed`: the `stable_revision` of the snapshot in force.
        """
        is_new = self.stable_after == rollout and self.stable_revision > followed
        return self.stable_pool if is_new else ""

    def with_stable(self, pool: str, rollout: str, followed: int) -> Desired:
        """Return the next revision, in which an operator makes `pool` stable. A shadow ends.

        The arguments are those of `stable_pool_after`. The number is above `followed`: an earlier document may be lost.
        """
        number = max(self.revision, followed) + 1
        return msgspec.structs.replace(
            self,
            revision=number,
            stable_pool=pool,
            stable_after=rollout,
            stable_revision=number,
            shadow=None,
        )

    def with_shadow(self, order: ShadowOrder | None) -> Desired:
        """Return the next revision, with the shadow of `order`, or without a shadow."""
        return msgspec.structs.replace(self, revision=self.revision + 1, shadow=order)

    def with_regions(self, orders: RegionOrders) -> Desired:
        """Return the next revision, with the orders about regions."""
        return msgspec.structs.replace(self, revision=self.revision + 1, regions=orders)

    def cordoned(self, entry: CordonEntry) -> Desired:
        """Return the document with `entry` in place of the process's earlier ones."""
        kept = tuple(each for each in self.cordons if each.process_id != entry.process_id)
        return msgspec.structs.replace(self, cordons=(*kept, entry))

    def without_gone(self, boots: Mapping[str, str]) -> Desired:
        """Return the document without cordons of boots that are gone. `boots`: boot id by leased process."""
        kept = tuple(
            each
            for each in self.cordons
            if not each.boot_id or boots.get(each.process_id, each.boot_id) == each.boot_id
        )
        return msgspec.structs.replace(self, cordons=kept)

    def uncordoned(self, process_id: str) -> Desired:
        """Return the document without cordons of the process."""
        kept = tuple(each for each in self.cordons if each.process_id != process_id)
        return msgspec.structs.replace(self, cordons=kept)

    def ending(self, rollouts: tuple[str, ...]) -> Desired:
        """Return the document with `rollouts` among the ended ones."""
        known = [each for each in self.ended_rollouts if each not in rollouts]
        return msgspec.structs.replace(self, ended_rollouts=(*known, *rollouts)[-ENDED_MAX:])

    def content_cordons(self) -> tuple[Cordon, ...]:
        """Return the cordons of a snapshot."""
        return tuple(
            Cordon(each.process_id, each.boot_id, is_draining=each.draining, reason=each.reason)
            for each in self.cordons
        )


def encode(desired: Desired) -> bytes:
    """Return the document as JSON."""
    return msgspec.json.encode(desired)


def decode(data: bytes) -> Desired:
    """Return the document in `data`. Raises msgspec.DecodeError."""
    return _decoder.decode(data)


_decoder: Final = msgspec.json.Decoder(Desired)
