"""Documents as one control process knows them: revisions never go back, and what Redis lost is put back."""

from __future__ import annotations

import random

import pytest

from controlplane.rollouts.document import ROLLOUTS_MAX
from controlplane.store.documents import (
    DESIRED,
    VALUE_BYTES_MAX,
    Document,
    Documents,
    is_name,
    read_value,
    value_of,
)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{}",
        value_of(Document(0, b"{}")),
        value_of(Document(1, b"{}")).replace(b"{}", b"[]"),
        b'{"revision":1}',
        value_of(Document(-1, b"{}")),
        value_of(Document(9007199254740993, b"{}")),
        b" " + value_of(Document(1, b"{}")),
        value_of(Document(1, b" " * VALUE_BYTES_MAX)),
    ],
)
def test_junk_is_no_document(value: bytes) -> None:
    """Another program may have written the key."""
    assert read_value(value) is None


def test_a_value_is_json_with_its_revision_first() -> None:
    """The script in Redis reads the revision without parsing the document."""
    document = Document(7, b'{"revision":9,"x":"}"}')
    head = f'{{"revision":7,"digest":"{document.digest}","document":'.encode()
    assert value_of(document) == head + document.data + b"}"
    assert read_value(value_of(document)) == document


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("", True),
        ("r-20261123-101502", True),
        ("../x", False),
        ("a/b", False),
        (".x", False),
        ("x" * 65, False),
    ],
)
def test_names_are_safe_as_names_of_files(name: str, is_known: bool) -> None:
    """A name comes from Redis."""
    assert is_name(name) == is_known


class Redis:
    """A Redis that follows the rule of write_document.lua, loses everything, or goes back in time."""

    def __init__(self) -> None:
        self.values: dict[str, Document] = {}

    def write(self, name: str, document: Document, replaces: int) -> bool:
        """Compare and set."""
        present = self.values.get(name)
        if present is not None and present.revision > replaces:
            return False
        self.values[name] = document
        return True


def read(redis: Redis, documents: Documents) -> None:
    """Read as the store does, and put back what Redis lost."""
    changed = {name: document for name, document in redis.values.items() if document != documents.get(name)}
    revisions = {name: document.revision for name, document in redis.values.items()}
    for restore in documents.take(changed, revisions):
        if redis.write(restore.name, restore.document, restore.replaces):
            documents.stored(restore.name, restore.document)


@pytest.mark.parametrize("seed", range(50))
def test_no_stored_revision_is_lost_while_one_process_lives(seed: int) -> None:
    """Three processes write, Redis is flushed and goes back: the highest stored revision of each document comes back."""
    chance = random.Random(seed)
    redis, processes = Redis(), [Documents() for _ in range(3)]
    highest: dict[str, int] = {}
    for _ in range(200):
        process, name = chance.choice(processes), chance.choice([DESIRED, "r-1", "r-2"])
        before = {each: process.revision(each) for each in (DESIRED, "r-1", "r-2")}
        match chance.randrange(10):
            case 0:
                redis.values.clear()
            case 1:
                redis.values = {key: Document(1, b"old") for key in redis.values}
            case 2 | 3 | 4:
                read(redis, process)
            case _:
                known = process.revision(name)
                document = Document(known + 1, b"%d" % chance.getrandbits(32))
                if redis.write(name, document, known):
                    process.stored(name, document)
                    highest[name] = max(highest.get(name, 0), document.revision)
        assert all(process.revision(each) >= before[each] for each in before), f"seed={seed}"
    for process in (*processes, *processes):
        read(redis, process)
    assert {name: document.revision for name, document in redis.values.items()} == highest, f"seed={seed}"
    assert len({tuple(sorted(process.rollouts.items())) for process in processes}) == 1, f"seed={seed}"


def test_the_earliest_rollouts_are_forgotten() -> None:
    """The desired document stays, whatever the number of rollouts."""
    documents = Documents({DESIRED: Document(1, b"d")})
    for number in range(ROLLOUTS_MAX + 5):
        documents.stored(f"r-{number:03d}", Document(1, b"x"))
    assert len(documents.rollouts) == ROLLOUTS_MAX and documents.desired == b"d"
    assert min(documents.rollouts) == "r-005"


def test_at_an_equal_revision_the_document_of_redis_counts() -> None:
    """Two leaders may have written one revision. Redis decides."""
    documents = Documents({"r-1": Document(3, b"mine")})
    assert documents.take({"r-1": Document(3, b"stored")}, {"r-1": 3}) == []
    assert documents.rollouts == {"r-1": b"stored"}
