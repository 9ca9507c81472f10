"""The one write of a document that is under way at a leader. Pure.

A document counts when Redis has it. A document that only takes traffic back counts at once if Redis does not answer; the
library writes it later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from msgspec.structs import replace as changed

from controlplane.actions import Action, AppendEvent
from controlplane.command_queue import Command
from controlplane.library import DESIRED, Document, Library, writing
from controlplane.rollouts.document import DocumentError, RolloutDocument


@dataclass(frozen=True, slots=True)
class Write:
    """A write of a document."""

    document: Document
    is_back: bool
    """True if the document only takes traffic back."""
    command: Command | None = None
    """The command that asked for it. None: the state machine did."""
    confirmed: Mapping[str, int] = field(default_factory=dict)
    """Observations that the document holds: last sequence number by frontend."""


class Outcome(Enum):
    """State of a write."""

    UNDER_WAY = auto()
    WRITTEN = auto()
    IN_FORCE = auto()
    """Not written, and in force: the document takes traffic back."""
    TOO_LARGE = auto()
    CONFLICT = auto()
    """Another leader wrote the document."""
    UNKNOWN = auto()
    """Redis did not answer. It may have executed the write."""

    @property
    def counts(self) -> bool:
        """True if the document is in force."""
        return self in (Outcome.WRITTEN, Outcome.IN_FORCE)


class DocumentWrites:
    """See the module. `emit` takes the actions."""

    def __init__(self, library: Library, emit: Callable[[Action], None]) -> None:
        self._library = library
        self._emit = emit
        self._number = 0
        """Number of the last write."""
        self._write: Write | None = None
        self._too_large: set[str] = set()
        """Documents that were too large once. The audit has it once."""

    @property
    def is_idle(self) -> bool:
        """True while no write is under way."""
        return self._write is None

    def begin(self, write: Write, *, has_redis: bool) -> tuple[Write, Outcome]:
        """Begin `write`, and return it as it is written. Only while `is_idle`."""
        assert self.is_idle, "one write at a time"
        self._number += 1
        is_encoded = self._send(write, has_redis=has_redis)
        if not is_encoded and isinstance(write.document, RolloutDocument) and write.document.judge:
            # The judge begins the step anew at the next leader, so no leader needs the observations any more.
            write = replace(write, document=changed(write.document, judge=""))
            is_encoded = self._send(write, has_redis=has_redis)
        if self._write is not None:
            return write, Outcome.UNDER_WAY
        return write, Outcome.IN_FORCE if write.is_back else Outcome.TOO_LARGE

    def end(self, number: int, is_written: bool | None) -> tuple[Write, Outcome] | None:
        """Return write `number` with its outcome. False: a conflict. None: Redis did not answer. None for an old write."""
        write = self._write
        if write is None or number != self._number:
            return None
        self._write = None
        if is_written:
            return write, Outcome.WRITTEN
        is_unreadable = _name(write.document) in self._library.problems
        if write.is_back and (is_written is None or is_unreadable):
            return write, Outcome.IN_FORCE
        return write, Outcome.UNKNOWN if is_written is None else Outcome.CONFLICT

    def drop(self) -> Command | None:
        """Forget the write that is under way, and return its command. Redis may have executed it."""
        write, self._write = self._write, None
        return write.command if write is not None else None

    def _send(self, write: Write, *, has_redis: bool) -> bool:
        """Emit the write, unless Redis does not answer and the document needs none. Return False if it is too large."""
        document = write.document
        try:
            action = writing(self._number, document, self._library.revision(document))
        except DocumentError as error:
            if (name := _name(document)) not in self._too_large:
                self._too_large.add(name)
                self._emit(AppendEvent("rollout.too_large", name, str(error)))
            return False
        if has_redis or not write.is_back:
            self._write = write
            self._emit(action)
        return True


def _name(document: Document) -> str:
    return document.id if isinstance(document, RolloutDocument) else DESIRED
