"""Answers of routers are checked and merged. Nothing that a router sends breaks the record or gets into a text."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from controlplane.warmup import hot_record
from controlplane.warmup.hot_record import (
    PREFIX_BYTES,
    AnswerRefused,
    HotPrefix,
    HotRecord,
    RouterAnswer,
    merged,
)
from kvmesh.attach.frames import pack_ids
from kvmesh.router.v1 import router_pb2 as pb

BLOCK = 4
IDS = pack_ids(range(BLOCK))


def part_of(prefixes: Sequence[pb.HotPrefix] = (), **fields: Any) -> pb.ListHotPrefixesResponse:
    return pb.ListHotPrefixesResponse(
        prefixes=prefixes, **{"model_version": "m", "block_tokens": BLOCK, **fields}
    )


def prefix(token_ids: bytes = IDS, weight: float = 1.0, tenants: int = 1, **holders: int) -> pb.HotPrefix:
    held = [
        pb.HotPrefixHolder(replica=name.replace("_", "-"), block_count=count)
        for name, count in holders.items()
    ]
    return pb.HotPrefix(token_ids=token_ids, weight=weight, tenant_count=tenants, holders=held)


def answer(*parts: pb.ListHotPrefixesResponse, bytes_max: int = 1 << 20) -> RouterAnswer:
    taken = RouterAnswer("m", BLOCK, bytes_max)
    for part in parts:
        taken.take(part)
    taken.is_complete = True
    return taken


@pytest.mark.parametrize("seed", range(60))
def test_records_of_routers_that_saw_parts_of_the_same_work(seed: int) -> None:
    """Weights add up, tenant counts are never more than one router saw, holders are united: by brute force."""
    rng = random.Random(seed)
    tokens = [pack_ids([at] * BLOCK * rng.randrange(1, 4)) for at in range(8)]
    sent: list[tuple[int, bytes, float, int, dict[str, int]]] = []
    answers = {}
    for router in range(rng.randrange(1, 5)):
        chosen = rng.sample(tokens, rng.randrange(len(tokens) + 1))
        parts = [part_of()]
        for token_ids in chosen:
            blocks = len(token_ids) // 4 // BLOCK
            holders = {f"prefill-{at}": rng.randint(1, blocks) for at in range(3) if rng.random() < 0.5}
            weight, tenants = rng.choice((0.5, 2.0, 7.0)), rng.randint(1, 255)
            sent.append((router, token_ids, weight, tenants, holders))
            message = prefix(token_ids, weight, tenants)
            message.holders.extend(
                pb.HotPrefixHolder(replica=name, block_count=count) for name, count in holders.items()
            )
            if rng.random() < 0.3:
                parts.append(pb.ListHotPrefixesResponse())
            parts[-1].prefixes.append(message)
        answers[f"router-{router}"] = answer(*parts)
    record = merged(answers)
    assert record.incomplete == ()
    assert sorted(one.token_ids for one in record.prefixes) == sorted({row[1] for row in sent})
    for one in record.prefixes:
        rows = [row for row in sent if row[1] == one.token_ids]
        assert one.weight == pytest.approx(sum(row[2] for row in rows))
        assert one.tenant_count == max(row[3] for row in rows)
        united: dict[str, int] = {}
        for row in rows:
            for name, count in row[4].items():
                united[name] = max(count, united.get(name, 0))
        assert one.holders == united
    keys = [(-one.weight, len(one.token_ids)) for one in record.prefixes]
    assert keys == sorted(keys)


def test_shapes_of_routers_add_up() -> None:
    """Those of the first part of each answer, the heaviest first."""
    one = answer(
        part_of(shapes=[pb.HotShape(prompt_tokens=64, weight=2.0), pb.HotShape(batch=8, weight=1.5)])
    )
    other = answer(part_of(shapes=[pb.HotShape(batch=8, weight=1.0)]))
    other.take(part_of(shapes=[pb.HotShape(batch=16, weight=9.0)]))
    record = merged({"router-0": one, "router-1": other})
    assert [(each.prompt_tokens, each.batch, each.weight) for each in record.shapes] == [
        (0, 8, 2.5),
        (64, 0, 2.0),
    ]


@pytest.mark.parametrize(
    "bad",
    [
        prefix(b""),
        prefix(IDS[:-1]),
        prefix(IDS[:-4]),
        prefix(IDS + IDS[:4]),
        prefix(pack_ids([0, 0, 0]) + b"\xff\xff\xff\xff"),
        prefix(weight=math.nan),
        prefix(weight=math.inf),
        prefix(weight=-1.0),
        prefix(weight=0.0),
        prefix(weight=1e300),
        prefix(tenants=0),
        prefix(tenants=256),
        prefix(tenants=0xFFFFFFFF),
    ],
    ids=range(13),
)
def test_a_prefix_that_breaks_a_rule_is_left_out(bad: pb.HotPrefix) -> None:
    """And counted. The others stay."""
    good = prefix(pack_ids(range(9, 9 + BLOCK)))
    taken = answer(part_of([bad, good]))
    assert [one.token_ids for one in merged({"r": taken}).prefixes] == [good.token_ids]
    assert taken.dropped_count == 1


def test_a_router_cannot_count_a_prefix_twice() -> None:
    """In one part or in two."""
    taken = answer(part_of([prefix(), prefix(weight=5.0)]), pb.ListHotPrefixesResponse(prefixes=[prefix()]))
    assert [one.weight for one in taken.prefixes.values()] == [1.0] and taken.dropped_count == 2


def test_a_holder_that_breaks_a_rule_is_left_out() -> None:
    """More blocks than the prefix has, none, or a name that no process may have; and of many holders the last ones."""
    held = prefix(prefill_0=1, prefill_1=2, prefill_2=0, prefill_3=0xFFFFFFFF)
    held.holders.add(replica="", block_count=1)
    held.holders.add(replica="a" * 129, block_count=1)
    held.holders.add(replica="a\nb", block_count=1)
    (one,) = answer(part_of([held])).prefixes.values()
    assert one.holders == {"prefill-0": 1}
    many = prefix()
    many.holders.extend(pb.HotPrefixHolder(replica=f"decode-{at}", block_count=1) for at in range(1000))
    (one,) = answer(part_of([many])).prefixes.values()
    assert len(one.holders) == hot_record.HOLDERS_MAX


@pytest.mark.parametrize(
    "shape",
    [
        pb.HotShape(weight=1.0),
        pb.HotShape(prompt_tokens=1, batch=1, weight=1.0),
        pb.HotShape(batch=1, weight=math.nan),
        pb.HotShape(batch=1, weight=1e300),
    ],
    ids=range(4),
)
def test_a_shape_that_breaks_a_rule_is_left_out(shape: pb.HotShape) -> None:
    """And so is a second one of the same kind."""
    good = pb.HotShape(batch=2, weight=1.0)
    taken = answer(part_of(shapes=[shape, good, good]))
    assert taken.shapes == {(0, 2): 1.0} and taken.dropped_count == 2


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model_version": "other"}, "model version 'other'; 'm' is needed"),
        ({"model_version": ""}, "model version ''; 'm' is needed"),
        ({"block_tokens": 8}, "block_tokens is 8; 4 is needed"),
    ],
    ids=str,
)
def test_an_answer_for_another_version_is_refused(fields: dict[str, Any], text: str) -> None:
    """Its prefixes would have other hashes."""
    taken = RouterAnswer("m", BLOCK, 1 << 20)
    with pytest.raises(AnswerRefused, match=text):
        taken.take(part_of([prefix()], **fields))
    assert merged({"r": taken}) == HotRecord(incomplete=("r",))


def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes, and in its number of prefixes: the heaviest ones stay, because they come first."""
    parts = [part_of([prefix(pack_ids([at] * BLOCK), 100.0 - at) for at in range(50)])]
    size = len(IDS) + PREFIX_BYTES
    taken = RouterAnswer("m", BLOCK, 7 * size + 5)
    assert not taken.take(parts[0])
    assert taken.byte_count == 7 * size and len(taken.prefixes) == 7
    assert min(one.weight for one in taken.prefixes.values()) == 94.0
    monkeypatch.setattr(hot_record, "PREFIXES_MAX", 5)
    taken = RouterAnswer("m", BLOCK, 1 << 20)
    assert not taken.take(parts[0]) and len(taken.prefixes) == 5
    assert merged({"r": taken}).incomplete == ("r",)


def test_texts_have_no_token() -> None:
    """Neither a prefix nor a record nor an answer shows its tokens."""
    taken = answer(part_of([prefix(b"secretsecretsecr")]))
    record = merged({"r": taken})
    assert isinstance(record.prefixes[0], HotPrefix)
    assert "secret" not in f"{taken!r} {record!r} {record} {record.prefixes[0]}"
