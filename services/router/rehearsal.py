"""One request through a private core of a starting router, so that no code of the hot path runs for the first time later.

Pure. The core, its policy and its replicas belong to the rehearsal alone: the router learns nothing from it. The messages
are encoded and decoded as on the wire.
"""

from __future__ import annotations

import random
from typing import Final

from kvmesh import blocks
from kvmesh.attach import frames
from kvmesh.attach.outbox import DownwardOutbox, UpwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.admission import ForwardingLimits
from services.router.forwarding.core import ForwardingCore
from services.router.gossip import messages
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from services.router.placement.policy import DISPATCH_LIFE_S, DispatchEvent

VERSION: Final = "rehearsal"
REQUEST_ID: Final = "0" * 32
BLOCKS: Final = 4
OUTPUT_TOKENS: Final = 3


class _Link:
    """A link without a stream."""

    def __init__(self) -> None:
        self.outbox = UpwardOutbox()


class Rehearsal:
    """See the module. `run` may be called repeatedly; each run is a new request."""

    def __init__(self, block_tokens: int, *, dispatch_ahead_s: float, local_prefill_tokens_max: int) -> None:
        self._block_tokens = block_tokens
        local_index = LocalPrefixIndex()
        policy = CostPolicy(
            "rehearsal",
            local_index,
            random.Random(0),
            block_tokens=block_tokens,
            dispatch_ahead_s=dispatch_ahead_s,
            local_prefill_tokens_max=min(local_prefill_tokens_max, BLOCKS * block_tokens - 1),
        )
        self._now_s = 0.0
        self.core = ForwardingCore(
            *("rehearsal", VERSION, block_tokens, policy, ForwardingLimits()),
            publish=self._publish,
            forecast=policy,
        )
        self._links = {"prefill": _Link(), "decode": _Link()}
        for name, link in self._links.items():
            local_index.add(name)
            replica = self.core.add_replica(name, "prefill" if name == "prefill" else "decode")
            replica.connect(link)

    def run(self, now_s: float) -> int:
        """Run one request from its submit to its finish; return the number of tokens that came back."""
        core, outbox, self._now_s = self.core, DownwardOutbox(), now_s
        for name in self._links:
            core.replicas[name].on_attached(self._links[name], pb.Hello(process_id=name), now_s)
            report = pb.LoadReport(engine_ready=True, block_total_count=64 * BLOCKS)
            self._answer(name, now_s, load_report=report)
        session = core.open_session(pb.Hello(process_id="frontend"), outbox, now_s)
        session.on_request(pb.AttachRequest.FromString(self._request().SerializeToString()), now_s)
        core.after_event(now_s)
        decode = self._slot("decode", now_s)
        self._answer("decode", now_s, acceptances=[pb.Acceptance(slot=decode)])
        prefill = self._slot("prefill", now_s)
        self._answer("prefill", now_s, starts=[pb.Start(slot=prefill)], first_tokens=[self._first(prefill)])
        self._links["decode"].outbox.take(now_s)
        self._answer("decode", now_s, transfers=[pb.Transfer(slot=decode)], frame=_frame(decode))
        self._answer("decode", now_s, finishes=[_finish(decode)])
        message = outbox.take(now_s)
        core.close_session(session, now_s)
        if message is None:
            return 0
        answer = pb.AttachResponse.FromString(message.SerializeToString())
        return len(answer.first_tokens) + sum(answer.frame.counts)

    def _publish(self, event: DispatchEvent) -> None:
        """Encode and decode a gossip message; no peer router gets it."""
        entry = messages.Entry("rehearsal", "0", 1, (event,))
        messages.decode(messages.encode(entry, self._now_s), self._now_s, DISPATCH_LIFE_S)

    def _request(self) -> pb.AttachRequest:
        token_ids = frames.pack_ids(range(BLOCKS * self._block_tokens))
        submit = pb.Submit(
            slot=1,
            request_id=REQUEST_ID,
            attempt=1,
            token_ids=token_ids,
            block_hashes=blocks.pack(blocks.chain(token_ids, self._block_tokens, VERSION)),
            block_tokens=self._block_tokens,
            sampling=pb.Sampling(top_p=1.0),
            credit_position=OUTPUT_TOKENS,
            model_version=VERSION,
            end_token_id=-1,
        )
        submit.budget.remaining_ms, submit.budget.max_output_tokens = 60_000, OUTPUT_TOKENS
        submit.budget.tenant, submit.budget.weight = "rehearsal", 1.0
        return pb.AttachRequest(submits=[submit])

    def _slot(self, name: str, now_s: float) -> int:
        """Return the slot of the submit that waits for replica `name`; 0: none waits."""
        message = self._links[name].outbox.take(now_s)
        return message.submits[-1].slot if message is not None and message.submits else 0

    def _answer(self, name: str, now_s: float, **rows: object) -> None:
        message = pb.AttachResponse(**rows)  # type: ignore[arg-type]  # rows by field name
        answer = pb.AttachResponse.FromString(message.SerializeToString())
        self.core.replicas[name].on_response(self._links[name], answer, now_s)

    def _first(self, slot: int) -> pb.FirstToken:
        tokens = BLOCKS * self._block_tokens
        return pb.FirstToken(
            slot=slot, computed_token_count=tokens, prefill_us=1_000, context_phase_params=b"handoff"
        )


def _frame(slot: int) -> pb.StepFrame:
    count = OUTPUT_TOKENS - 1
    ids = frames.pack_ids([1] * count)
    return pb.StepFrame(slots=[slot], positions=[1], counts=[count], token_ids=ids)


def _finish(slot: int) -> pb.Finish:
    return pb.Finish(slot=slot, end_position=OUTPUT_TOKENS, reason=pb.Finish.REASON_LENGTH)
