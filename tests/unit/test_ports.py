"""Free ports: none is given out twice within the time of a start, whatever the file of reservations holds."""

from __future__ import annotations

import errno
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvmesh import ports
from kvmesh.ports import FIRST, RESERVED_S, free_ports

HOST = "127.0.0.1"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of reservations, in a folder of its own; there are 60 ports."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(ports, "_ephemeral_first", lambda: FIRST + 60)
    monkeypatch.setattr(ports, "_is_free", lambda address, port: True)
    return ports.reservations_path()


def test_two_starts_get_different_ports_until_the_first_one_is_over(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process listens yet, and no port is given out twice. After RESERVED_S all are free again."""
    first, second = set(free_ports(HOST, 30)), set(free_ports(HOST, 30))
    assert len(first) == len(second) == 30 and not first & second
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    later = time.time() + RESERVED_S + 1
    monkeypatch.setattr("time.time", lambda: later)
    third = set(free_ports(HOST, 30))
    assert third & first and third & second
    assert {int(line.split()[0]) for line in file.read_text().splitlines()} == third


def test_starts_at_the_same_moment_get_different_ports(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has a descriptor of its own, and so a lock of its own, as a process has."""

    def is_free(address: str, port: int) -> bool:
        os.sched_yield()
        return True

    monkeypatch.setattr(ports, "_is_free", is_free)
    with ThreadPoolExecutor(6) as threads:
        found = [port for each in threads.map(lambda _: free_ports(HOST, 10), range(6)) for port in each]
    assert len(set(found)) == len(found) == 60


def test_reserved_ports_are_better_than_none(file: Path) -> None:
    """Where all other ports are taken, a reserved one is returned."""
    reserved = set(free_ports(HOST, 40))
    found = set(free_ports(HOST, 30))
    assert len(found) == 30 and len(found & reserved) == 10


@pytest.mark.parametrize("line", ["{port}", "x {port}", "{port} nan", "{port} 9e99", "{port} 1.0", "\0"])
def test_a_file_of_anything_reserves_nothing(file: Path, line: str) -> None:
    """Damaged lines, ends that a clock set back left, and ends that are over."""
    half = range(FIRST, FIRST + 30)
    file.write_text("".join(f"{line.format(port=port)}\n" for port in half))
    assert set(free_ports(HOST, 30)).intersection(half)


def test_a_file_that_cannot_be_used_costs_no_start(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link, a folder, another user's file: ports are given out without reservations."""
    target = file.with_name("target")
    file.symlink_to(target)
    assert len(set(free_ports(HOST, 60))) == 60 and not target.exists()
    file.unlink()
    file.mkdir()
    assert len(set(free_ports(HOST, 60))) == 60
    file.rmdir()
    file.write_text("")
    fstat = os.fstat
    monkeypatch.setattr(
        "os.fstat", lambda fd: os.stat_result((*fstat(fd)[:4], os.getuid() + 1, *fstat(fd)[5:10]))
    )
    assert len(set(free_ports(HOST, 60))) == 60 and not file.read_text()


def test_ports_of_a_foreign_address_are_not_tried_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is resolved once, and the first error other than "taken" ends the search."""
    asked = []
    resolve = socket.getaddrinfo

    def counted(host: str, *more: Any) -> Any:
        asked.append(host)
        return resolve("192.0.2.1", *more)

    monkeypatch.setattr("kvmesh.ports.socket.getaddrinfo", counted)
    with pytest.raises(OSError, match="Cannot assign") as refused:
        free_ports("elsewhere", 1)
    assert refused.value.errno == errno.EADDRNOTAVAIL
    assert asked == ["elsewhere"]
