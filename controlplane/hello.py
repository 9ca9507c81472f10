"""Checks the first message of a receiver. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from controlplane.snapshots.receivers import Receiver
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.errors import MeshError, Violation, invalid
from kvmesh.roles import RECEIVERS
from kvmesh.snapshot.content import ENDED_MAX, NAME_BYTES_MAX, SnapshotError
from kvmesh.snapshot.published import TERM_MAX, Published, read, term_of
from kvmesh.trust.names import name_of

NAMES_MAX: Final = 64
"""Most capabilities, and most model versions, of one receiver."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A checked introduction."""

    receiver: Receiver
    snapshot: Published | None
    """The snapshot in force there. None: none, or one that this release must refuse."""
    ended_rollouts: tuple[str, ...]
    fault: str = ""
    """Why the snapshot counts as none. Empty: there is no fault."""


def hello_of(message: pb.WatchRequest) -> Hello:
    """Return the introduction in the first message. Raises MeshError, INVALID_ARGUMENT with field, value and range."""
    if not message.HasField("hello"):
        raise invalid("FIELD_OUT_OF_RANGE", [Violation("hello", "absent", "a hello in the first message")])
    hello = message.hello
    violations = [*_bad_names(hello), *_bad_lists(hello)]
    if hello.highest_term.number > TERM_MAX:
        violations.append(
            Violation("hello.highest_term.number", str(hello.highest_term.number), f"0 to {TERM_MAX}")
        )
    if violations:
        raise invalid("FIELD_OUT_OF_RANGE", violations)
    receiver = Receiver(
        hello.process_id,
        hello.boot_id,
        hello.role,
        hello.pool,
        frozenset(hello.capabilities),
        frozenset(hello.model_versions),
        highest_term=term_of(hello.highest_term),
    )
    snapshot, fault = _snapshot(hello)
    return Hello(receiver, snapshot, tuple(hello.ended_rollouts), fault)


def check_role(receiver: Receiver, identities: Sequence[str], mesh: str) -> None:
    """Raise MeshError PEER_REFUSED unless the caller's certificate names the role of its hello."""
    needed = name_of(receiver.role, mesh)
    if needed not in identities:
        shown = ", ".join(sorted(identities)) or "no name"
        raise MeshError(
            "PEER_REFUSED",
            f'hello.role is "{receiver.role}", which needs a certificate for {needed}; the caller\'s is for {shown}',
            metadata={"allowed": needed, "caller": shown},
        )


def _bad_names(hello: pb.ReceiverHello) -> Iterable[Violation]:
    for field, value, least in (
        ("process_id", hello.process_id, 1),
        ("boot_id", hello.boot_id, 1),
        ("pool", hello.pool, 0),
    ):
        size = len(value.encode())
        if not least <= size <= NAME_BYTES_MAX:
            yield Violation(f"hello.{field}", f"{size} bytes", f"{least} to {NAME_BYTES_MAX} bytes")
        elif not value.isprintable():
            yield Violation(f"hello.{field}", ascii(value), "printable characters")
    if hello.role not in RECEIVERS:
        yield Violation("hello.role", f'"{hello.role[:64]}"', f"one of {', '.join(RECEIVERS)}")


def _bad_lists(hello: pb.ReceiverHello) -> Iterable[Violation]:
    for field, values, most in (
        ("capabilities", hello.capabilities, NAMES_MAX),
        ("model_versions", hello.model_versions, NAMES_MAX),
        ("ended_rollouts", hello.ended_rollouts, ENDED_MAX),
    ):
        if len(values) > most:
            yield Violation(f"hello.{field}", f"{len(values)} entries", f"up to {most} entries")
        longest = max((len(value.encode()) for value in values), default=0)
        if longest > NAME_BYTES_MAX:
            yield Violation(f"hello.{field}", f"an entry of {longest} bytes", f"up to {NAME_BYTES_MAX} bytes")
        elif not all(value.isprintable() for value in values):
            yield Violation(f"hello.{field}", "an entry with control characters", "printable characters")


def _snapshot(hello: pb.ReceiverHello) -> tuple[Published | None, str]:
    if not hello.HasField("snapshot"):
        return None, ""
    try:
        return read(hello.snapshot.SerializeToString(deterministic=True)), ""
    except SnapshotError as error:
        return None, str(error)
