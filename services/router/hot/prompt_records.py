"""The released prompts of users, the last one of each session, within a bound on age and on bytes. Pure.

The index of a router has hashes alone, and a hot prefix is sent as tokens. So the tokens of prompts are kept, in memory
alone: no text of this package has a token or the name of a tenant.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from services.router.hot.decay import decayed

BYTES_MAX: Final = 64 << 20
"""Bound on the bytes of all records."""

AGE_MAX_S: Final = 600.0
"""Older records are dropped. Their weight is below 1 %."""

RECORD_BYTES: Final = 1_024
"""Bytes that a record counts beside its tokens and hashes: its objects, its names, and its share of an analysis."""


class PromptRecord:
    """The last prompt of a session, or the prompt of a request without a session. Immutable."""

    __slots__ = ("at_s", "block_hashes", "byte_count", "request_id", "tenant", "token_ids", "weight")

    def __init__(
        self,
        tenant: str,
        request_id: str,
        token_ids: bytes,
        block_hashes: bytes,
        weight: float,
        at_s: float,
    ) -> None:
        """`token_ids` and `block_hashes`: as in the submit. `weight`: decayed requests of the session, at `at_s`.

        `byte_count` is the number of bytes that count against BYTES_MAX.
        """
        self.tenant = tenant
        self.request_id = request_id
        self.token_ids = token_ids
        self.block_hashes = block_hashes
        self.weight = weight
        self.at_s = at_s
        self.byte_count = len(token_ids) + len(block_hashes) + RECORD_BYTES

    def __repr__(self) -> str:
        return f"PromptRecord({len(self.token_ids) // 4} tokens, weight {self.weight:.3g} at {self.at_s:.3f})"


class PromptRecords:
    """Records in the order of their last request.

    INVARIANT: `byte_count` is the sum of the records' bytes, and at most `bytes_max`.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.byte_count = 0
        self._bytes_max = bytes_max
        self._records: OrderedDict[str | tuple[str, str], PromptRecord] = OrderedDict()
        """By tenant and session, or by the id of a request without a session."""

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"PromptRecords({len(self)} prompts, {self.byte_count} bytes)"

    def add(
        self,
        tenant: str,
        session_id: str,
        request_id: str,
        token_ids: bytes,
        block_hashes: bytes,
        now_s: float,
    ) -> None:
        """Keep the prompt of a request in place of the session's last one. The session's weight decays and rises by 1.

        A second attempt of the session's last request changes nothing. Times must not descend. O(1) amortized: the least
        recent records make room. A prompt beyond the bound on bytes is not kept.
        """
        records = self._records
        key = (tenant, session_id) if session_id else request_id
        last = records.get(key)
        weight = 1.0
        if last is not None:
            if last.request_id == request_id:
                return
            weight += decayed(last.weight, now_s - last.at_s)
        record = PromptRecord(tenant, request_id, token_ids, block_hashes, weight, now_s)
        added = record.byte_count
        if added > self._bytes_max:
            return
        records[key] = record
        if last is not None:
            records.move_to_end(key)
            added -= last.byte_count
        self.byte_count += added
        while self.byte_count > self._bytes_max:
            _, record = records.popitem(last=False)
            self.byte_count -= record.byte_count

    def drop_expired(self, now_s: float) -> None:
        """Drop the records without a request in the last AGE_MAX_S."""
        records = self._records
        while records and now_s - next(iter(records.values())).at_s > AGE_MAX_S:
            _, record = records.popitem(last=False)
            self.byte_count -= record.byte_count

    def current(self) -> Sequence[PromptRecord]:
        """Return the records, the least recent first. Later changes do not reach the answer."""
        return list(self._records.values())

    def assert_consistent(self) -> None:
        """Raise AssertionError if the bytes or the order are wrong. O(records)."""
        records = self.current()
        assert self.byte_count == sum(one.byte_count for one in records) <= self._bytes_max, self
        times = [one.at_s for one in records]
        assert times == sorted(times), "records are not in the order of their requests"
