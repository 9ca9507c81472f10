"""The document of a shadow: its order, the counts of each frontend, the last differences, its end. Pure.

It is stored for KEPT_S. A report of a frontend replaces the earlier one of the same boot, so that a report may be lost or
repeated. INVARIANT: the sum of all counts never falls while the shadow runs.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Final, TypeVar

import msgspec
from google.protobuf.message import DecodeError

from controlplane.rollouts.document import DOCUMENT_BYTES_MAX, DocumentError
from controlplane.shadow.order import ShadowOrder
from kvmesh.control.v1 import shadow_pb2 as pb
from kvmesh.snapshot.content import REVISION_MAX

KEPT_S: Final = 7 * 24 * 3600.0
"""Time for which an ended shadow is stored."""

SHADOWS_MAX: Final = 20
"""Documents of shadows that are kept, the latest."""

DIFFERENCES_MAX: Final = 1_000
FRONTENDS_MAX: Final = 64
"""Boots of frontends with counts of their own. Those of the boots before are added up in one entry."""

REPORT_BYTES_MAX: Final = 128 << 10
"""Largest report. A larger one is ignored."""

EARLIER: Final = "earlier"
"""Name of the entry with the counts of earlier boots."""

BIN_MAX: Final = 300

Name = TypeVar("Name", str, int)
"""Key of a map field."""


class FrontendCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The last report of one boot of a frontend."""

    counts: str
    """A serialized `ShadowCounts`, in base64."""
    sequence: int = 0
    off_reason: str = ""
    difference_number: int = 0
    """Number of its last difference."""


class DifferenceRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One difference, as `ShadowDifference`."""

    frontend: str
    number: int
    request_id: str
    pool: str
    kind: str
    position: int = 0
    user_outcome: str = ""
    copy_outcome: str = ""
    user_tokens: tuple[int, ...] = ()
    copy_tokens: tuple[int, ...] = ()
    at_ms: int = 0


class ShadowDocument(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    order: ShadowOrder
    frontends: dict[str, FrontendCounts] = {}
    """By "process id/boot id"."""
    differences: tuple[DifferenceRow, ...] = ()
    """The last ones, the latest last."""
    ledger_tokens: int = 0
    """Tokens that the mesh has taken from the ceiling."""
    ended_s: float = 0.0
    """Wall clock, Unix seconds. 0: the shadow runs."""
    end_reason: str = ""
    revision: int = 1

    @property
    def id(self) -> str:
        """Id of the shadow."""
        return self.order.id

    @property
    def is_over(self) -> bool:
        """True if the shadow has ended."""
        return bool(self.ended_s)

    def counts(self) -> pb.ShadowCounts:
        """Return the sum over all frontends."""
        return summed(_counts_of(each.counts) for each in self.frontends.values())

    def off_reasons(self) -> dict[str, str]:
        """Return why each frontend copies nothing now, by process; empty texts for those that copy."""
        return {
            name.rpartition("/")[0]: each.off_reason
            for name, each in self.frontends.items()
            if name != EARLIER
        }

    def with_report(self, process_id: str, report: pb.ShadowReport) -> ShadowDocument:
        """Return the document with the report of a frontend. One that was overtaken, or is unsound, changes nothing."""
        name = f"{process_id}/{report.boot_id}"
        known = self.frontends.get(name)
        if not is_sound(report) or (known is not None and report.sequence < known.sequence):
            return self
        last = known.difference_number if known is not None else 0
        rows = [row for row in report.differences if row.number > last]
        entry = FrontendCounts(
            counts=base64.b64encode(report.counts.SerializeToString(deterministic=True)).decode(),
            sequence=report.sequence,
            off_reason=report.off_reason[:64],
            difference_number=max((row.number for row in rows), default=last),
        )
        frontends = {**{other: each for other, each in self.frontends.items() if other != name}, name: entry}
        differences = (*self.differences, *(_row(process_id, row) for row in rows))
        return msgspec.structs.replace(
            self,
            frontends=_bounded(frontends),
            differences=differences[-DIFFERENCES_MAX:],
            ledger_tokens=max(self.ledger_tokens, report.ledger_tokens),
        )

    def ended(self, reason: str, wall_s: float) -> ShadowDocument:
        """Return the document of the shadow, which ended by `reason`."""
        return msgspec.structs.replace(self, ended_s=wall_s, end_reason=reason)


def summed(every: Iterable[pb.ShadowCounts]) -> pb.ShadowCounts:
    """Return the sum of counts. All of them add up."""
    total = pb.ShadowCounts()
    for each in every:
        total.sampled += each.sampled
        total.copied += each.copied
        total.tokens += each.tokens
        _add_map(total.dropped, each.dropped)
        add_arm(total.target, each.target)
        add_arm(total.baseline, each.baseline)
        total.latency.pairs += each.latency.pairs
        _add_map(total.latency.ttft, each.latency.ttft)
        _add_map(total.latency.gap, each.latency.gap)
    return total


def add_arm(total: pb.ShadowArm, arm: pb.ShadowArm) -> None:
    """Add the counts of `arm` to `total`."""
    for field in pb.ShadowArm.DESCRIPTOR.fields:
        if field.name == "errors":
            _add_map(total.errors, arm.errors)
        else:
            setattr(total, field.name, getattr(total, field.name) + getattr(arm, field.name))


def is_sound(report: pb.ShadowReport) -> bool:
    """True if a report is small, and its numbers are in range. A process of another release may send anything."""
    counts = report.counts
    arms = (counts.target, counts.baseline)
    floats = [
        getattr(arm, field.name)
        for arm in arms
        for field in pb.ShadowArm.DESCRIPTOR.fields
        if field.type == field.TYPE_DOUBLE
    ]
    bins = [*counts.latency.ttft, *counts.latency.gap]
    names = [*counts.dropped, *counts.target.errors, *counts.baseline.errors, report.boot_id]
    rows = [text for row in report.differences for text in (row.request_id, row.pool, row.kind)]
    return (
        report.ByteSize() <= REPORT_BYTES_MAX
        and all(math.isfinite(each) and abs(each) < 1e18 for each in floats)
        and all(-BIN_MAX <= each <= BIN_MAX for each in bins)
        and all(len(each) <= 256 and each.isprintable() for each in (*names, *rows))
        and all(arm.differences <= arm.tokens < 1 << 53 for arm in arms)
        and all(arm.error_sessions <= arm.sessions < 1 << 53 for arm in arms)
    )


def encode(document: ShadowDocument) -> bytes:
    """Return the JSON of `document`. The oldest differences are left out of one that is too large."""
    data = _encoder.encode(document)
    while len(data) > DOCUMENT_BYTES_MAX and document.differences:
        kept = document.differences[len(document.differences) // 2 + 1 :]
        document = msgspec.structs.replace(document, differences=kept)
        data = _encoder.encode(document)
    return data


def decode(shadow: str, data: bytes) -> ShadowDocument:
    """Return the document of `shadow` in `data`. Raises DocumentError."""
    try:
        document = _decoder.decode(data)
        document.counts()
    except (msgspec.DecodeError, UnicodeDecodeError, DecodeError, binascii.Error, ValueError) as error:
        raise DocumentError(f'the document of shadow "{shadow}" cannot be read: {error}') from error
    if document.id != shadow or not 1 <= document.revision <= REVISION_MAX:
        raise DocumentError(f'the document of shadow "{shadow}" contradicts itself')
    return document


def _counts_of(text: str) -> pb.ShadowCounts:
    return pb.ShadowCounts.FromString(base64.b64decode(text, validate=True))


def _bounded(frontends: Mapping[str, FrontendCounts]) -> dict[str, FrontendCounts]:
    """Return `frontends`, the oldest entries added up in EARLIER if there are more than FRONTENDS_MAX."""
    kept = dict(frontends)
    surplus = [name for name in kept if name != EARLIER][: max(0, len(kept) - FRONTENDS_MAX)]
    if not surplus:
        return kept
    gone = [kept.pop(name) for name in surplus]
    earlier = kept.pop(EARLIER, None)
    total = summed(_counts_of(each.counts) for each in (*gone, *([earlier] if earlier is not None else ())))
    counts = base64.b64encode(total.SerializeToString(deterministic=True)).decode()
    return {EARLIER: FrontendCounts(counts=counts), **kept}


def _row(process_id: str, row: pb.ShadowDifference) -> DifferenceRow:
    return DifferenceRow(
        frontend=process_id,
        number=row.number,
        request_id=row.request_id,
        pool=row.pool,
        kind=row.kind,
        position=row.position,
        user_outcome=row.user_outcome[:64],
        copy_outcome=row.copy_outcome[:64],
        user_tokens=tuple(row.user_tokens[:16]),
        copy_tokens=tuple(row.copy_tokens[:16]),
        at_ms=row.at_ms,
    )


def _add_map(total: MutableMapping[Name, int], more: Mapping[Name, int]) -> None:
    for name, count in more.items():
        total[name] += count


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(ShadowDocument)
