"""KV transfer over real sockets: complete, truncated, rejected, frozen, aborted; and the handoff blob."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from engines.contract import errors
from engines.contract.errors import EngineError, TransferError
from engines.reference import kv_transfer
from engines.reference.blocks import ArrayBlocks
from engines.reference.handoff import Handoff, HandoffTable, decode
from engines.reference.kv_transfer import KvListener, KvPuller, KvSource
from tests.patience import quiet_s
from tests.unit.engine.engines import wait_until

_STORE = np.arange(64, dtype=np.uint64).reshape(8, 8)
_HANDOFF = Handoff("boot", 1, "", [5], [0.0], 20, 8, [1, 2], 3, 64, "digest")


@contextmanager
def _serving(table: HandoffTable) -> Iterator[tuple[Handoff, list[bool]]]:
    ends: list[bool] = []

    def end(handoff_id: int, is_acknowledged: bool) -> None:
        table.end_send(handoff_id, is_acknowledged=is_acknowledged)
        ends.append(is_acknowledged)

    listener = KvListener(
        KvSource("boot", "digest", ArrayBlocks(_STORE), table.begin_send, end), "127.0.0.1", 0
    )
    listener.start()
    try:
        yield replace_address(f"127.0.0.1:{listener.port}"), ends
    finally:
        listener.close()


def replace_address(address: str, **changes: object) -> Handoff:
    """Return the test's handoff with another address and other fields."""
    return msgspec.structs.replace(_HANDOFF, address=address, **changes)


def _table() -> HandoffTable:
    table = HandoffTable()
    table.hold(1, [4, 2, 7], 100.0)
    return table


def _pull(handoff: Handoff, first: int, count: int, timeout_s: float = 2.0) -> npt.NDArray[np.uint64]:
    taken: list[bytearray] = []
    KvPuller(handoff, first, count, timeout_s).pull(taken.append)
    return np.frombuffer(taken[0], dtype=np.uint64).reshape(count, 8)


@contextmanager
def _fake_source(answer: Callable[[socket.socket], None]) -> Iterator[Handoff]:
    """Run a peer that applies `answer` to its one connection, then closes the connection."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield replace_address(f"127.0.0.1:{server.getsockname()[1]}")
    finally:
        server.close()
        thread.join(5.0)


def test_missing_blocks_come_in_order_and_are_acknowledged() -> None:
    """Only the blocks that the puller lacks are sent; then the handoff ends."""
    table = _table()
    with _serving(table) as (handoff, ends):
        assert np.array_equal(_pull(handoff, 1, 2), _STORE[[2, 7]])
        wait_until(lambda: ends == [True], "acknowledged")
        assert table.held() == (0, 0)


def test_nothing_missing_is_still_acknowledged() -> None:
    """A fully cached prompt ends the handoff at the source, too."""
    table = _table()
    with _serving(table) as (handoff, ends):
        assert _pull(handoff, 3, 0).size == 0
        wait_until(lambda: ends == [True], "acknowledged")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"handoff_id": 9}, "KV handoff 9 is unknown or expired at"),
        ({"boot_id": "earlier"}, "KV handoff 1 is unknown or expired at"),
        ({"digest": "other"}, "KV cache transfer failed"),
        ({"block_bytes": 32}, "KV cache transfer failed"),
    ],
)
def test_a_source_rejects_pulls_of_blocks_it_does_not_hold(changes: dict[str, object], expected: str) -> None:
    """Another boot, arithmetic or id: a typed error, and the blocks stay held."""
    table = _table()
    with _serving(table) as (handoff, _), pytest.raises(TransferError, match=expected):
        _pull(replace_address(handoff.address, **changes), 0, 3)
    assert table.held() == (1, 3)


def test_a_puller_that_dies_leaves_the_handoff_held() -> None:
    """Without the acknowledgement another attempt can pull the blocks until they expire."""
    table = _table()
    with _serving(table) as (handoff, ends):
        host, _, port = handoff.address.rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            ask = kv_transfer._PullRequest("boot", 1, 0, 64, "digest")
            deadline_s = time.monotonic() + 2.0
            kv_transfer._write_message(connection, ask, deadline_s)
            kv_transfer._read_message(connection, deadline_s)
            kv_transfer._read(connection, 3 * 64, deadline_s)
        wait_until(lambda: ends == [False], "send given up")
        assert _pull(handoff, 0, 3).shape == (3, 8)


def test_garbage_does_not_stop_the_listener() -> None:
    """A client that sends garbage does not disturb other connections."""
    with _serving(_table()) as (handoff, _):
        host, _, port = handoff.address.rpartition(":")
        for garbage in (b"", b"\xff" * 50, b"\x05\x00\x00\x00hello", b"\x02\x00"):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(garbage)
        assert _pull(handoff, 0, 3).shape == (3, 8)


def _header(count: int) -> bytes:
    body = b'{"blocks":%d,"error":null}' % count
    return len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", "connection ended after 0 of 4 bytes"),
        (_header(3)[:7], "connection ended after 3 of"),
        (_header(3) + b"x" * 100, "connection ended after 100 of 192 bytes"),
        (_header(2), "has 2 blocks, 3 wanted"),
        (b"\xff\xff\xff\xff", "header of 4294967295 bytes"),
        (b"\x03\x00\x00\x00abc", "KV cache transfer failed"),
    ],
)
def test_a_truncated_or_wrong_response_is_an_error(answer: bytes, expected: str) -> None:
    """Truncated data, wrong counts and garbage raise an error, and no block is taken."""

    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answer)

    with _fake_source(serve) as handoff, pytest.raises(TransferError, match=expected):
        _pull(handoff, 0, 3)


def test_a_frozen_source_fails_the_pull_at_the_deadline() -> None:
    """One deadline covers the whole pull, at any speed of the source."""
    thawed = threading.Event()
    with _fake_source(lambda _: (thawed.wait(5.0), None)[1]) as handoff:
        with pytest.raises(TransferError, match="timed out"):
            _pull(handoff, 0, 3, timeout_s=0.1)
        thawed.set()


def test_abort_ends_a_pull_at_once() -> None:
    """A cancelled request does not wait for the deadline."""
    asked, thawed = threading.Event(), threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        asked.set()
        thawed.wait(5.0)

    failures: list[TransferError] = []
    with _fake_source(serve) as handoff:
        puller = KvPuller(handoff, 0, 3, 30.0)

        def pull() -> None:
            try:
                puller.pull(lambda _: None)
            except TransferError as error:
                failures.append(error)

        thread = threading.Thread(target=pull)
        thread.start()
        assert asked.wait(5.0)
        puller.abort()
        thread.join(2.0)
        thawed.set()
        assert not thread.is_alive() and len(failures) == 1


def test_a_dead_source_is_an_error() -> None:
    """No process listens at the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(TransferError, match="refused"):
        _pull(replace_address(address), 0, 3)


def test_release_and_expiry_wait_for_a_send_in_progress() -> None:
    """Blocks that the listener reads are freed only after the send."""
    table = _table()
    assert table.begin_send(1) == [4, 2, 7]
    assert table.begin_send(1) is None, "one taker at a time"
    assert table.expire(1000.0) == [] and table.release(1) is None
    assert table.held() == (1, 3)
    assert table.end_send(1, is_acknowledged=False) == [4, 2, 7]
    assert table.held() == (0, 0) and table.release(1) is None


def test_every_alteration_of_a_blob_is_detected() -> None:
    """A truncated or altered blob is rejected."""
    blob = replace_address("127.0.0.1:5").encode()
    assert decode(blob) == replace_address("127.0.0.1:5")
    for place in range(len(blob)):
        with pytest.raises(EngineError, match="context_phase_params is malformed"):
            decode(blob[:place])
        with pytest.raises(EngineError, match="context_phase_params is malformed"):
            decode(blob[:place] + bytes([blob[place] ^ 1]) + blob[place + 1 :])


def test_error_texts_keep_what_clients_match_on() -> None:
    """The texts are part of the contract; README.md repeats them."""
    assert errors.HANDOFF_UNKNOWN.startswith("KV handoff {handoff} is unknown or expired")
    assert errors.TRANSFER_FAILED.startswith("KV cache transfer failed")


@pytest.mark.parametrize("sent", [0, 10, 4 + 3 + 100], ids=["nothing", "half a header", "half the blocks"])
def test_a_stalled_source_fails_the_pull_before_the_deadline(
    sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stalled source costs the stall timeout, not the time of a pull, at every stage of the protocol."""
    monkeypatch.setattr(kv_transfer, "STALL_TIMEOUT_S", 0.2)
    thawed = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall((_header(3) + b"x" * 192)[:sent])
        thawed.wait(10.0)

    with _fake_source(serve) as handoff:
        began_s = quiet_s()
        with pytest.raises(TransferError, match="timed out"):
            _pull(handoff, 0, 3, timeout_s=30.0)
        assert quiet_s() - began_s < 5.0
        thawed.set()


def test_a_slow_source_is_not_a_stalled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stall timeout runs from the last byte: a slow source is not a stalled one."""
    monkeypatch.setattr(kv_transfer, "STALL_TIMEOUT_S", 1.0)

    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(_header(3))
        for _ in range(12):
            time.sleep(0.1)
            connection.sendall(b"x" * 16)
        connection.recv(4)

    with _fake_source(serve) as handoff:
        assert _pull(handoff, 0, 3, timeout_s=30.0).shape == (3, 8)


def test_a_frozen_puller_does_not_block_other_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A puller that stops reading is dropped after the stall timeout; other pulls are served meanwhile and afterwards."""
    monkeypatch.setattr(kv_transfer, "STALL_TIMEOUT_S", 0.5)
    table = _table()
    table.hold(2, [1, 3], 100.0)
    with _serving(table) as (handoff, ends):
        host, _, port = handoff.address.rpartition(":")
        with socket.create_connection((host, int(port))) as frozen:
            kv_transfer._write_message(
                frozen, kv_transfer._PullRequest("boot", 1, 0, 64, "digest"), time.monotonic() + 2
            )
            kv_transfer._read_message(frozen, time.monotonic() + 2.0)
            assert _pull(replace_address(handoff.address, handoff_id=2), 0, 2).shape == (2, 8)
            wait_until(lambda: bool(ends), "a transfer is over")
            assert ends[0] is True, "the frozen one was waited for"
            wait_until(lambda: ends == [True, False], "the frozen one is dropped")
            assert _pull(handoff, 0, 3).shape == (3, 8)


def test_stopping_a_request_releases_its_handoffs() -> None:
    """The response may have been lost, so only the request id can name the handoff."""
    table = HandoffTable()
    table.hold(1, [4], 100.0, "a")
    table.hold(2, [5, 6], 100.0, "b")
    table.hold(3, [7], 100.0, "b")
    assert table.begin_send(3) == [7]
    assert table.release_of_request("b") == [[5, 6]] and table.release_of_request("nobody") == []
    assert table.held() == (2, 2)
    assert table.end_send(3, is_acknowledged=False) == [7], "released while it was sent"


def test_a_listener_waits_for_the_port_of_a_killed_engine() -> None:
    """The process for the model outlives its server for a moment, and an operator starts the next one at once."""
    with socket.create_server(("127.0.0.1", 0)) as former:
        listener = KvListener(
            KvSource("boot", "digest", ArrayBlocks(_STORE), lambda _: None, lambda *_: None),
            "127.0.0.1",
            former.getsockname()[1],
        )
        starting = threading.Thread(target=listener.start)
        starting.start()
        starting.join(4 * kv_transfer._BIND_EVERY_S)
        assert starting.is_alive(), "it neither listens nor fails"
    starting.join(kv_transfer.BIND_S)
    assert not starting.is_alive()
    socket.create_connection(("127.0.0.1", listener.port)).close()
    listener.close()
