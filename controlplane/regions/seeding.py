"""Seedings between regions: hot prompts of one region are replayed in another one, before and while load moves. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import msgspec

from controlplane.regions.observed import State
from controlplane.regions.settings import RegionSettings
from controlplane.regions.target import Target


class Seeding(msgspec.Struct, frozen=True):
    """Wish to replay hot prompts of `source` in `target`. One of them is the own region."""

    source: str
    target: str
    reason: str


def seedings(
    own: str,
    targets: Collection[Target],
    spill: Mapping[str, float],
    *,
    is_spill_wanted: bool,
    now_s: float,
    settings: RegionSettings,
) -> Iterator[Seeding]:
    """Yield the seedings that would help at `now_s`.

    A target in OUT is seeded before it recovers. A suspect one may send its callers here, and its share of the own spill
    to the target with the largest grant. A spill or a drain of the own region seeds that target, too.
    """
    usable = [each for each in targets if each.spill_target(now_s).takes_new]
    following = max(usable, key=lambda each: each.grant(now_s).tokens_per_s, default=None)
    for target in targets:
        if target.observed.wants_seeding(settings):
            yield Seeding(own, target.name, "it recovers")
        elif target.observed.state is State.SUSPECT:
            yield Seeding(target.name, own, f"{target.name} is SUSPECT")
            if following is not None and spill.get(target.name):
                yield Seeding(own, following.name, f"{target.name} is SUSPECT")
    if following is not None and is_spill_wanted:
        yield Seeding(own, following.name, "own callers spill")
