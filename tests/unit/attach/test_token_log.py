"""Token logs: a reader sees each position once and in order, through windows, takeovers and broken streams."""

import random

import pytest

from kvmesh.attach import frames
from kvmesh.attach.token_log import Gap, TokenLog, admit


@pytest.mark.parametrize("seed", range(200))
def test_readers_see_every_position_once(seed: int) -> None:
    """Random appends, credits, lost frames and takeovers: the reader ends with exactly the log."""
    rng = random.Random(seed)
    start, total = rng.randrange(5), rng.randrange(1, 60)
    oracle = [rng.randrange(4096) for _ in range(total)]
    beside = rng.choice((0, 0, 1, 3))
    log = TokenLog(start, credit=start, with_logprobs=rng.random() < 0.3, alternatives=beside)
    made, got, others = 0, list[int](), b""
    for _ in range(10_000):
        choice = rng.random()
        if choice < 0.4 and made < total:
            step = oracle[made : made + rng.randint(1, 3)]
            log.append(step, alternatives=b"".join(alternatives(each, beside) for each in step))
            made += len(step)
        elif choice < 0.6:
            log.grant(start + len(got) + rng.randrange(6))
        elif choice < 0.7:  # the stream breaks: a new reader takes over at the position of the old one
            log.rewind(start + len(got), start + len(got) + rng.randrange(4))
        elif (chunk := log.take()) is not None:
            assert chunk.position + len(chunk.token_ids) // 4 <= log.credit, f"seed={seed}"
            row = frames.Row(1, chunk.position, len(chunk.token_ids) // 4, *chunk[1:])
            again = rng.random() < 0.2  # a repeated frame
            for _ in range(1 + again):
                fresh = admit(row, start + len(got))
                if fresh is not None:
                    got += frames.unpack_ids(fresh.token_ids)
                    others += fresh.alternatives
        if len(got) == total:
            break
    assert got == oracle, f"seed={seed}"
    assert others == b"".join(alternatives(each, beside) for each in oracle)
    sizes = [each * total + 8 * beside * total for each in (4, 8)]
    assert log.is_drained() and log.size_bytes in sizes


def alternatives(token: int, count: int) -> bytes:
    """Return the alternatives beside `token`."""
    return frames.pack_alternatives(range(token, token + count), [-0.5 * each for each in range(count)])


def test_missing_alternatives_are_no_token() -> None:
    """An engine that reports none for some tokens keeps the others in their place."""
    log = TokenLog(0, credit=9, alternatives=1)
    log.append([5, 6], alternatives=alternatives(5, 1))
    chunk = log.take()
    assert chunk is not None
    assert frames.unpack_alternatives(chunk.alternatives)[0] == (5, -1)


def test_a_gap_is_found() -> None:
    """A row that starts after the reader's position is a gap."""
    with pytest.raises(Gap, match="has 3 tokens; the row starts at position 4"):
        admit(frames.Row(1, 4, 1, b"1234", b""), 3)


def test_a_row_that_overlaps_is_cut() -> None:
    """Only the missing positions remain, and the log-probabilities are cut in the same way."""
    row = frames.Row(1, 2, 3, frames.pack_ids([7, 8, 9]), frames.pack_logprobs([-1, -2, -3]))
    fresh = admit(row, 4)
    assert fresh is not None
    assert (fresh.position, fresh.count, frames.unpack_ids(fresh.token_ids)) == (4, 1, (9,))
    assert frames.unpack_logprobs(fresh.logprobs) == (-3.0,)
    assert admit(row, 5) is None


def test_blocked_means_tokens_wait_for_the_window() -> None:
    """A log is blocked only while it has tokens outside its reader's window."""
    log = TokenLog(0, 1)
    assert not log.is_blocked()
    log.append([1, 2])
    assert not log.is_blocked() and log.take() is not None
    assert log.is_blocked()
    assert log.grant(2) and not log.grant(1)
    assert not log.is_blocked()
