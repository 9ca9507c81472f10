"""A published snapshot: its name, its bytes, and the order of names (fencing tokens). Pure.

Names are ordered by term, then by version. A term is a number and the process id of its leader. So two leaders that took
one number need no arbiter: every receiver prefers the same one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.snapshot import content as contents
from kvmesh.snapshot.content import Content, SnapshotError

TERM_MAX: Final = 1 << 53
"""Largest number of a term."""

JUMP_MAX: Final = 1 << 32
"""Largest step of a number that is believed. One broken receiver, or junk in Redis, cannot use up all numbers.

A new process knows no number, so its first step is the whole number of the mesh. A term each second reaches JUMP_MAX after
136 years, and TERM_MAX is 2^21 such steps away.
"""

SNAPSHOT_BYTES_MAX: Final = 1 << 20
"""Largest published snapshot. A larger one is refused before it is parsed."""


class Term(NamedTuple):
    """Term of a leader. Ordered by number, then by the leader's process id."""

    number: int
    leader: str

    def __str__(self) -> str:
        return f"{self.number}.{self.leader}"


NO_TERM: Final = Term(0, "")
"""Below every term."""


class Name(NamedTuple):
    """Name of a snapshot. Ordered by term, then by version; the digest orders nothing."""

    term: Term
    version: int
    digest: bytes = b""

    @property
    def order(self) -> tuple[Term, int]:
        """Order of the name."""
        return self.term, self.version

    def __str__(self) -> str:
        return f"{self.term}/{self.version}"


NO_NAME: Final = Name(NO_TERM, 0)
"""Below every name of a snapshot."""


@dataclass(frozen=True, slots=True)
class Published:
    """One published snapshot. `data` is the same in Redis, in state folders and in messages."""

    name: Name
    content: Content
    data: bytes

    def __repr__(self) -> str:
        return f"Published({self.name}, canary {self.content.canary_percent} %)"


def publish(term: Term, version: int, content: Content) -> Published:
    """Return `content` under the name of `term` and `version`. Raises SnapshotError if a receiver must refuse it."""
    contents.check(content)
    if not 1 <= term.number <= TERM_MAX or not 0 < len(term.leader.encode()) <= contents.NAME_BYTES_MAX:
        raise SnapshotError(
            f'the term is {term.number} of "{term.leader}"; 1 to {TERM_MAX} of a named leader is allowed'
        )
    if version < 1:
        raise SnapshotError(f"the version is {version}; 1 or more is allowed")
    body = contents.encode(content)
    name = Name(term, version, hashlib.sha256(body).digest())
    message = pb.Snapshot(name=name_message(name), content=body)
    data = message.SerializeToString(deterministic=True)
    if len(data) > SNAPSHOT_BYTES_MAX:
        raise SnapshotError(f"the snapshot has {len(data)} bytes; up to {SNAPSHOT_BYTES_MAX} are allowed")
    return Published(name, content, data)


def read(data: bytes) -> Published:
    """Return the snapshot in `data`. Raises SnapshotError."""
    message, name = _named(data)
    return Published(name, contents.decode(message.content), data)


def read_name(data: bytes) -> Name:
    """Return the name of the snapshot in `data`, with a valid digest. The content may be invalid. Raises SnapshotError."""
    return _named(data)[1]


def _named(data: bytes) -> tuple[pb.Snapshot, Name]:
    if len(data) > SNAPSHOT_BYTES_MAX:
        raise SnapshotError(f"the snapshot has {len(data)} bytes; up to {SNAPSHOT_BYTES_MAX} are allowed")
    message = pb.Snapshot()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise SnapshotError("the bytes are no Snapshot") from error
    name = name_of(message.name)
    if hashlib.sha256(message.content).digest() != name.digest:
        raise SnapshotError(f"the digest of snapshot {name} does not match its content")
    return message, name


def name_of(message: pb.SnapshotName) -> Name:
    """Return the name in `message`. Raises SnapshotError if it is outside the allowed range."""
    term = term_of(message.term)
    is_leader = 0 < len(term.leader.encode()) <= contents.NAME_BYTES_MAX
    if not 1 <= term.number <= TERM_MAX or not is_leader or message.version < 1:
        raise SnapshotError(
            f'name is {term.number} of "{term.leader[:64]}", version {message.version}; '
            f"a term of 1 to {TERM_MAX}, a leader of 1 to {contents.NAME_BYTES_MAX} bytes and a version from 1 are needed"
        )
    return Name(term, message.version, message.sha256)


def term_of(message: pb.Term) -> Term:
    """Return the term in `message`."""
    return Term(message.number, message.leader)


def name_message(name: Name) -> pb.SnapshotName:
    """Return `name` as a message."""
    term = pb.Term(number=name.term.number, leader=name.term.leader)
    return pb.SnapshotName(term=term, version=name.version, sha256=name.digest)
