"""Health of a region from its signals, and the check of signals of peers."""

from __future__ import annotations

import math

import pytest

from controlplane.regions.settings import RegionSettings
from controlplane.regions.signals import Replicas, Signals, SignalWindow
from kvmesh.regions.quantity import Quantity

SETTINGS = RegionSettings()


def window(*signals: Signals, every_s: float = 2.0) -> SignalWindow:
    """Return a window with signals at 0, 2, 4 s and so on."""
    made = SignalWindow(SETTINGS)
    for place, each in enumerate(signals):
        made.add(each, place * every_s)
    return made


def serving(count: int, leased: int = 4) -> Signals:
    """Return signals with some of the decode replicas serving."""
    return Signals(replicas={"prefill": Replicas(2, 2), "decode": Replicas(count, leased)})


def test_health_is_the_lower_share() -> None:
    """The role with the fewest serving replicas counts, and so do attempts without a failure."""
    assert window(serving(3)).health(0) == 0.75
    replicas = {"decode": Replicas(4, 4)}
    assert window(Signals(replicas=replicas, attempts=100, failures=40)).health(0) == pytest.approx(0.6)


def test_health_is_over_ten_seconds() -> None:
    """Five signals count; the share of one bad signal is a fifth of it."""
    assert window(*[serving(4)] * 4, serving(0)).health(8) == pytest.approx(0.8)
    assert window(*[serving(0)] * 5, *[serving(4)] * 5).health(18) == 1.0


def test_signals_before_a_gap_do_not_count() -> None:
    """After 11 s of silence the window has the new signals alone."""
    assert window(serving(0), serving(4), every_s=11.0).health(11) == 1.0


def test_a_backlog_is_no_history() -> None:
    """Thirty late signals at once: the last five count."""
    assert window(*[serving(0)] * 25, *[serving(4)] * 5, every_s=0.0).health(0) == 1.0


def test_few_attempts_have_no_success_rate() -> None:
    """19 failures say nothing, 20 do."""
    assert window(Signals(attempts=19, failures=19)).health(0) is None
    assert window(Signals(attempts=10, failures=10), Signals(attempts=10, failures=10)).health(2) == 0.0


def test_old_signals_are_unknown() -> None:
    """After 6 s of silence neither well nor ill."""
    made = window(serving(4))
    assert made.health(6.0) == 1.0 and made.latest(6.0) is not None
    assert made.health(6.1) is None and made.latest(6.1) is None and made.last is not None
    assert SignalWindow(SETTINGS).health(0) is None


def test_load_moves_no_health() -> None:
    """A region at ten times its capacity is well."""
    busy = Signals(replicas={"decode": Replicas(1, 1)}, load=Quantity(1000), capacity=Quantity(100))
    assert window(busy).health(0) == 1.0


def test_cold_load_counts_every_prompt_token() -> None:
    """Blocks are the same anywhere."""
    assert Signals(load=Quantity(10, 4), cold_factor=5).cold_load == Quantity(50, 4)


@pytest.mark.parametrize(
    ("signals", "field"),
    [
        (Signals(replicas={"decode": Replicas(3, 2)}), "replicas of decode: 3"),
        (Signals(attempts=1, failures=2), "failures: 2"),
        (Signals(cold_factor=0.5), "cold_factor: 0.5"),
        (Signals(cold_factor=math.nan), "cold_factor: nan"),
        (Signals(engine_age_s=math.nan), "engine_age_s: nan"),
        (Signals(load=Quantity(math.nan)), "load"),
        (Signals(capacity=Quantity(-1)), "capacity"),
        (Signals(guests={"us": Quantity(math.inf)}), "guests of us"),
    ],
)
def test_signals_out_of_range_are_named(signals: Signals, field: str) -> None:
    """The fault begins with the field, and says what is allowed."""
    assert signals.fault().startswith(field) and "allowed" in signals.fault()


def test_sound_signals_have_no_fault() -> None:
    """The default is sound, too."""
    assert Signals().fault() == "" == serving(2).fault()
