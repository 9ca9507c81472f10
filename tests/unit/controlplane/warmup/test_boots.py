"""Counts of boots that ended in their warm-up."""

from __future__ import annotations

from controlplane.warmup.boots import REPLICAS_MAX, Boots


def test_the_third_boot_has_no_package_and_the_fourth_no_warm_up() -> None:
    """Service ends the count."""
    boots, allowed = Boots(), []
    for _ in range(4):
        allowed.append((boots.may_use_package("a"), boots.may_warm_up("a")))
        boots.failed("a", "")
    assert allowed == [(True, True), (True, True), (False, True), (False, False)]
    assert boots.may_use_package("b"), "another replica has a count of its own"
    boots.served("a")
    assert boots.count("a") == 0 and boots.may_use_package("a")


def test_boots_of_two_replicas_quarantine_a_package_once() -> None:
    """Boots of one replica do not, whatever their number. Service in between does not clear the package."""
    boots = Boots()
    assert not any(boots.failed("a", "p") for _ in range(3))
    boots.served("a")
    assert not boots.failed("b", "other")
    assert not boots.failed("b", "")
    assert boots.failed("b", "p")
    assert not boots.failed("c", "p"), "it is quarantined already"


def test_the_memory_is_bounded() -> None:
    """The earliest replica is dropped first."""
    boots = Boots()
    for at in range(REPLICAS_MAX + 1):
        boots.failed(f"r{at}", "")
    assert boots.count("r0") == 0 and boots.count("r1") == 1 and boots.count(f"r{REPLICAS_MAX}") == 1
