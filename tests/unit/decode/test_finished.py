"""Logs of finished requests: bounded in number, in bytes and in time."""

import random

from kvmesh.attach.token_log import TokenLog
from kvmesh.attach.v1 import attach_pb2 as pb
from services.decode.finished import FinishedLogs
from services.decode.slot import DecodeSlot, DecodeSubmission
from tests.unit.decode.test_core import LOCAL, Replica


def slot_with(tokens: int) -> DecodeSlot:
    log = TokenLog(0, tokens)
    log.append([7] * tokens)
    submitted = DecodeSubmission("r", 1, True, 4, tokens, 9.0, 9.0, 0.0, "")
    return DecodeSlot(submitted, log, 0, None)


def test_the_newest_logs_are_kept_within_both_bounds() -> None:
    """As many of the newest logs stay as number and bytes allow, and the newest one always."""
    for seed in range(100):
        rng = random.Random(seed)
        logs, twin = FinishedLogs(logs_max=8, bytes_max=4000), list[DecodeSlot]()
        for _ in range(200):
            if twin and rng.random() < 0.3:
                gone = rng.choice(twin)
                twin.remove(gone)
                logs.discard(gone)
                logs.discard(gone)
            else:
                slot = slot_with(rng.choice((1, 10, 100, 300, 1500)))
                twin.append(slot)
                forgotten = []
                while len(twin) > 1 and (len(twin) > 8 or sum(one.log.size_bytes for one in twin) > 4000):
                    forgotten.append(twin.pop(0))
                assert logs.add(slot) == forgotten, f"seed={seed}"
            logs.assert_consistent()
            assert len(logs) == len(twin) and all(one in logs for one in twin), f"seed={seed}"
            assert logs.size_bytes == sum(one.log.size_bytes for one in twin), f"seed={seed}"


def test_a_forgotten_log_is_gone_from_the_replica() -> None:
    """Above the limit the oldest log cannot be taken over, the newest can. After the detached time no log is left."""
    replica = Replica()
    replica.core.slot_table.finished = FinishedLogs(bytes_max=50)
    for number in range(1, 6):
        replica.submit(number, LOCAL, request_id=f"{number}" * 32, output=4)
        replica.step(4)
    slot_table = replica.core.slot_table
    assert len(slot_table.slots) == len(slot_table.finished) == 3 and slot_table.log_bytes() == 48
    old, new = replica.reader.open(11, 0), replica.reader.open(12, 0)
    replica.send(adopts=[pb.Adopt(slot=11, request_id="1" * 32, attempt=1, credit_position=100)])
    replica.send(adopts=[pb.Adopt(slot=12, request_id="5" * 32, attempt=1, credit_position=100)])
    assert old.refusal is not None and old.refusal.reason == pb.Refusal.REASON_UNKNOWN_REQUEST
    assert len(new.ids) == 4 and new.finish is not None
    replica.pass_time(3.1)
    assert not slot_table.slots and not slot_table.finished.size_bytes
