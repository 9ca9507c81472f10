"""Lives, packages and prefixes as messages: complete, and without tokens."""

from __future__ import annotations

import time

import pytest

from controlplane import warm_up_views as views
from controlplane.warmup.jobs import SeedResult, Target
from controlplane.warmup.life import Life
from controlplane.warmup.life_state import number_of
from controlplane.warmup.packages import Package, PackageError, ShapeRow, decode, encode, package_name
from controlplane.warmup.prefixes import RegisteredPrefix
from controlplane.warmup.references import ReferenceKey
from kvmesh.attach.frames import pack_ids
from kvmesh.life_state import LifeState
from kvmesh.snapshot.content import REVISION_MAX

KEY = ReferenceKey("v1", "e1")
TOKEN = 1_234_567_890


def package(**fields: object) -> Package:
    given: dict[str, object] = {
        "name": package_name("decode", KEY),
        "model_version": "v1",
        "role": "decode",
        "engine_digest": "e1",
        "made_s": 1_000_000.0,
    }
    return Package(**{**given, **fields})  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shapes", (ShapeRow(-1),)),
        ("shapes", (ShapeRow(0),)),
        ("shapes", (ShapeRow(8, 2**31),)),
        ("shapes", (ShapeRow(2**40),)),
        ("revision", 0),
        ("revision", REVISION_MAX + 1),
        ("made_s", -1.0),
        ("made_s", 1e300),
        ("prefixes", ((-1,),)),
        ("prefixes", ((2**31,),)),
        ("hashes", (2**64,)),
        ("form", 2),
    ],
)
def test_no_stored_package_breaks_the_list(field: str, value: object) -> None:
    """A value that no message can carry is refused at the read, with its field and the allowed range."""
    wrong = package(**{field: value})
    with pytest.raises(PackageError, match=f"{field} .*(is|are|no)"):
        decode(wrong.name, encode(wrong))


def test_a_lost_engine_is_the_reason_that_operators_see() -> None:
    """Until the engine answers. A quarantined replica keeps the reason of its quarantine."""
    target = Target("prefill-0", "b1", "engine-1", "prefill", "default", "v1", 16, "r:1", "")
    life = Life(target, KEY, LifeState.SERVING, 0.0, 0.0, LifeState.SERVING)
    life.reason = "3 golden prompts are left"
    assert views.life(life, 0, 1.0).reason == "3 golden prompts are left"
    life.engine_silent_s = 1.0
    assert views.life(life, 0, 2.0).reason == "3 golden prompts are left"
    assert views.life(life, 0, 4.0).reason == views.ENGINE_LOST
    life.state = LifeState.QUARANTINED
    assert views.life(life, 0, 4.0).reason == "3 golden prompts are left"


def test_limits_of_a_package_fit_its_message() -> None:
    """The largest values that are read become a message."""
    most = package(
        shapes=(ShapeRow(2**31 - 1, 2**31 - 1),),
        revision=REVISION_MAX,
        made_s=253_402_300_799.0,
        hashes=(2**64 - 1,),
    )
    shown = views.profile(decode(most.name, encode(most)))
    assert (shown.revision, shown.shapes[0].batch, shown.hash_count) == (REVISION_MAX, 2**31 - 1, 1)


def test_views_have_counts_and_no_tokens() -> None:
    """A token is in no field of a package or a prefix."""
    shown = views.profile(package(prefixes=((TOKEN, TOKEN), (TOKEN,)), golden=((TOKEN,),)))
    assert (shown.prefix_count, shown.prefix_token_count, shown.has_golden) == (2, 3, True)
    prefix = views.prefix(
        RegisteredPrefix(name="p", model_version="v1", token_ids=(TOKEN,), at_s=time.time())
    )
    assert prefix.token_count == 1
    for message in (shown, prefix):
        assert str(TOKEN) not in str(message)
        assert pack_ids([TOKEN]) not in message.SerializeToString()


def test_a_life_has_its_times_in_order() -> None:
    """States in the order of the life, whichever came first, and the blocks of its seeding."""
    target = Target("decode-0", "b", "e", "decode", "default", "v1", 16, "d:1", "")
    life = Life(target, KEY, LifeState.SERVING, since_s=10.0, seen_s=0.0, reported=LifeState.PROBING)
    life.times = {LifeState.PROBING: 0.5, LifeState.STARTING: 2.25, LifeState.WARMING: 3.0}
    life.seed = SeedResult(pulled_blocks=5, replayed_blocks=6)
    shown = views.life(life, 2, 14.5)
    assert [(each.state, each.time.ToNanoseconds()) for each in shown.times] == [
        (number_of(LifeState.STARTING), 2_250_000_000),
        (number_of(LifeState.WARMING), 3_000_000_000),
        (number_of(LifeState.PROBING), 500_000_000),
    ]
    assert (shown.age.ToNanoseconds(), shown.failed_boot_count) == (4_500_000_000, 2)
    assert (shown.pulled_block_count, shown.replayed_block_count) == (5, 6)
    assert (shown.state, shown.reported) == (number_of(LifeState.SERVING), number_of(LifeState.PROBING))
