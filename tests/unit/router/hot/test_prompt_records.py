"""Records stay within their bytes and age, and count each request of a session once, decayed."""

from __future__ import annotations

import random
from math import exp

import pytest

from services.router.hot.decay import DECAY_S
from services.router.hot.prompt_records import AGE_MAX_S, RECORD_BYTES, PromptRecords

SECRET = b"\xca\xfe\xba\xbe" * 8


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_stay_within_the_bounds(seed: int) -> None:
    """The records are the most recent sessions that fit, with the last prompt of each and the decayed sum of its requests.

    Checked against a list of all requests: whatever comes, and whenever records expire.
    """
    rng = random.Random(seed)
    bytes_max = rng.choice((3, 10, 40)) * (RECORD_BYTES + 60)
    records = PromptRecords(bytes_max)
    requests: dict[object, list[float]] = {}
    prompts: dict[object, bytes] = {}
    sizes: dict[object, int] = {}
    now_s = 1000.0
    for number in range(300):
        now_s += rng.choice((0.0, 0.1, 5.0, 90.0))
        if rng.random() < 0.1:
            records.drop_expired(now_s)
            for key in [key for key in requests if now_s - requests[key][-1] > AGE_MAX_S]:
                del requests[key]
        tenant, session = rng.choice("ab"), rng.choice(("", *"123456789"))
        request_id = f"r{number}"
        key = (tenant, session) if session else request_id
        prompt = rng.randbytes(4 * rng.randrange(1, 40)) if rng.random() < 0.97 else bytes(bytes_max)
        hashes = bytes(8 * rng.randrange(4))
        records.add(tenant, session, request_id, prompt, hashes, now_s)
        if rng.random() < 0.3:  # another attempt of the same request
            records.add(tenant, session, request_id, prompt, hashes, now_s)
        size = len(prompt) + len(hashes) + RECORD_BYTES
        if size <= bytes_max:
            requests[key] = [*requests.pop(key, []), now_s]
            prompts[key], sizes[key] = prompt, size
            while sum(sizes[each] for each in requests) > bytes_max:
                del requests[next(iter(requests))]
        records.assert_consistent()
        assert records.byte_count == sum(sizes[each] for each in requests) <= bytes_max
        found = records.current()
        assert [one.token_ids for one in found] == [prompts[each] for each in requests]
        for one, times in zip(found, requests.values(), strict=True):
            expected = sum(exp((times[-1] - each) / -DECAY_S) for each in times)
            assert one.weight == pytest.approx(expected) and one.at_s == times[-1]


def test_an_old_record_is_dropped_without_a_new_one() -> None:
    """A record lives AGE_MAX_S after its last request."""
    records = PromptRecords()
    records.add("t", "s", "r", SECRET, bytes(8), 100.0)
    records.drop_expired(100.0 + AGE_MAX_S)
    assert len(records) == 1
    records.drop_expired(100.1 + AGE_MAX_S)
    assert len(records) == 0 and records.byte_count == 0


def test_an_answer_does_not_change_afterwards() -> None:
    """An analysis that takes long sees the records of its start."""
    records = PromptRecords()
    records.add("t", "s", "r1", SECRET, bytes(8), 100.0)
    (before,) = records.current()
    records.add("t", "s", "r2", SECRET * 2, bytes(16), 101.0)
    assert (before.token_ids, before.weight) == (SECRET, 1.0)


def test_texts_have_no_token_and_no_tenant() -> None:
    """Neither all records nor a single record shows tokens."""
    records = PromptRecords()
    records.add("tenant-x", "session-x", "r1", SECRET, SECRET[:8], 100.0)
    texts = f"{records!r} {records.current()!r} {records} {records.current()[0]}"
    assert "16 tokens" not in texts and "8 tokens" in texts
    assert not any(word in texts for word in ("tenant-x", "session-x", "xca", "xfe", "3199925962"))
