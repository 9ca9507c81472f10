"""Answers ListHotPrefixes from the recorded prompts, one call at a time, in slices, and within a time limit.

The answer has tokens of users. No log line, error or metric of this module has one, or the name of a tenant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Final

from kvmesh import blocks
from kvmesh.clock import Clock
from kvmesh.errors import MeshError, Violation, invalid
from kvmesh.router.v1 import router_pb2 as pb
from services.router.cooperative_yield import CooperativeYield
from services.router.hot.prefix_tree import HASH_BYTES, HotPrefix, PrefixTree
from services.router.hot.prompt_records import AGE_MAX_S, PromptRecord
from services.router.hot.release_recorder import ReleaseRecorder
from services.router.index.local_index import LocalPrefixIndex

CALL_S: Final = 10.0
"""Longest call. A caller that has not read its answer by then is cut off."""

EXPIRE_S: Final = 1.0
"""Interval in which expired records are dropped."""

RETRY_AFTER_S: Final = 1.0
"""Delay that a caller is told while another call runs."""

BLOCK_COUNT_MAX: Final = 1_000_000

PART_BYTES_MAX: Final = 1 << 20
"""Most bytes of a part of the answer."""

TOKEN_BYTES_MAX: Final = PART_BYTES_MAX - (64 << 10)
"""Most bytes of the tokens of a prefix: a part has its holders too. A longer prompt is given by its leading part."""

HOLDERS_MAX: Final = 16
"""Most holders of a prefix, those with the most blocks. A pull needs one."""

SLICE_RECORDS: Final = 32
"""Records in a slice of the analysis: some 0.3 ms."""

Write = Callable[[pb.ListHotPrefixesResponse], Awaitable[None]]


class HotPrefixListing:
    """The recorded prompts as an answer of the router."""

    def __init__(
        self,
        recorder: ReleaseRecorder,
        local_index: LocalPrefixIndex,
        model_version: str,
        block_tokens: int,
        clock: Clock,
        may_leave: Callable[[str, str], bool] = lambda _tenant, _region: True,
    ) -> None:
        """`may_leave(tenant, region)`: True if prompts of the tenant may be given to another region."""
        self._recorder = recorder
        self._local_index = local_index
        self._model_version = model_version
        self._block_tokens = block_tokens
        self._clock = clock
        self._may_leave = may_leave
        self.is_busy = False
        """True while a call is answered."""

    async def run(self) -> None:
        """Drop expired records until cancelled, also while no request comes."""
        while True:
            await asyncio.sleep(EXPIRE_S)
            self._recorder.prompts.drop_expired(self._clock.now_s())

    async def answer(self, request: pb.ListHotPrefixesRequest, write: Write) -> None:
        """Write the parts of the answer, the first one with the shapes, within CALL_S.

        Raises MeshError: FIELD_OUT_OF_RANGE, CALLS_FULL while another call runs, SLOW_READER after CALL_S. During a call
        the records that it began with stay in memory.
        """
        if not 1 <= request.block_count_max <= BLOCK_COUNT_MAX:
            count = Violation("block_count_max", str(request.block_count_max), f"1 to {BLOCK_COUNT_MAX:,}")
            raise invalid("FIELD_OUT_OF_RANGE", [count])
        if self.is_busy:
            raise MeshError(
                "CALLS_FULL",
                "the router answers one call of ListHotPrefixes at a time, and another one runs",
                {"held": "1", "limit": "1"},
                retry_after_s=RETRY_AFTER_S,
            )
        self.is_busy = True
        limit = asyncio.timeout(CALL_S)
        try:
            async with limit:
                await self._answer(request, write)
        except TimeoutError:
            if not limit.expired():
                raise
            raise MeshError(
                "SLOW_READER",
                f"the answer was not read within {CALL_S:g} s",
                {"limit_s": f"{CALL_S:g}"},
            ) from None
        finally:
            self.is_busy = False

    async def _answer(self, request: pb.ListHotPrefixesRequest, write: Write) -> None:
        now_s, pause = self._clock.now_s(), CooperativeYield(self._clock)
        tree = await pause.run_slices(self._tree(self._given_to(request.region), now_s))
        part = pb.ListHotPrefixesResponse(
            shapes=[
                pb.HotShape(prompt_tokens=each.prompt_tokens, batch=each.batch, weight=each.weight)
                for each in self._recorder.shapes.ranked(now_s)
            ],
            model_version=self._model_version,
            block_tokens=self._block_tokens,
        )
        part_bytes = part.ByteSize()
        for prefix in tree.ranked(request.block_count_max, request.tenant_count_min):
            await pause.yield_if_due()
            if prefix is None:
                continue
            message = self._message(prefix)
            message_bytes = message.ByteSize() + 8  # the tag and the length in front of it
            if part_bytes + message_bytes > PART_BYTES_MAX:
                await write(part)
                part, part_bytes = pb.ListHotPrefixesResponse(), 0
            part.prefixes.append(message)
            part_bytes += message_bytes
        await write(part)

    def _given_to(self, region: str) -> Sequence[PromptRecord]:
        """Return the records for a caller of `region`; empty: the own region, which gets all."""
        records = self._recorder.prompts.current()
        return [each for each in records if self._may_leave(each.tenant, region)] if region else records

    def _tree(self, records: Sequence[PromptRecord], now_s: float) -> Generator[None, None, PrefixTree]:
        tree = PrefixTree(self._block_tokens, TOKEN_BYTES_MAX // (4 * self._block_tokens))
        for number, record in enumerate(records, start=1):
            if now_s - record.at_s <= AGE_MAX_S:
                tree.insert(record, now_s)
            if number % SLICE_RECORDS == 0:
                yield
        return tree

    def _message(self, prefix: HotPrefix) -> pb.HotPrefix:
        record, block_count = prefix.record, prefix.block_count
        hashes = blocks.unpack(record.block_hashes[: HASH_BYTES * block_count])
        return pb.HotPrefix(
            token_ids=record.token_ids[: 4 * self._block_tokens * block_count],
            weight=prefix.weight,
            tenant_count=prefix.tenant_count,
            holders=self._holders(hashes),
        )

    def _holders(self, hashes: Sequence[int]) -> list[pb.HotPrefixHolder]:
        """Return at most HOLDERS_MAX replicas with leading blocks of `hashes`, those with the most blocks first.

        Among replicas with equally many blocks the first one differs from prefix to prefix, so that not all pulls go to it.
        """
        found: list[pb.HotPrefixHolder] = []
        for depth, mask in self._local_index.groups(hashes):
            names = self._local_index.names_of(mask)
            first, count = hashes[-1] % len(names), min(len(names), HOLDERS_MAX - len(found))
            chosen = (names[at % len(names)] for at in range(first, first + count))
            found += [pb.HotPrefixHolder(replica=name, block_count=depth) for name in chosen]
        return found
