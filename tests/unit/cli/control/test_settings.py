"""The options of `kvmesh rollout start`: each mistake is one sentence with option, value and range."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvmesh.bad_option import BadOption
from kvmesh.cli.control import settings as checked
from kvmesh.cli.control.durations import seconds_of
from kvmesh.cli.control.settings import StartOptions, check_name, check_reason, settings
from kvmesh.control.v1 import control_pb2 as pb

STEPS = "allowed are 1 to 16 ascending percentages of 1 to 100 with commas, the last 100."


def made(**options: Any) -> pb.RolloutSettings:
    """Return the settings of these options."""
    return settings(StartOptions(**{"to": "next", **options}))


def test_options_become_settings() -> None:
    """Every option has its field."""
    found = made(
        baseline="young",
        steps="10, 50,100",
        expect="different",
        bake="90s",
        bake_max="1.5h",
        keep_old="2h",
        require=("evaluation", "load"),
        only="tenant=a,b,a",
        never="tenant=c",
        on_inconclusive="pause",
        ttft_p95_max_s=0.5,
        error_share_max=0.02,
    )
    assert (found.to_pool, found.baseline_pool) == ("next", "young")
    assert list(found.steps_percent) == [10, 50, 100]
    assert [seconds_of(each) for each in (found.bake, found.bake_max, found.keep_old)] == [90, 5400, 7200]
    assert found.expectation == pb.EXPECTATION_DIFFERENT
    assert found.on_inconclusive == pb.ON_INCONCLUSIVE_PAUSE
    assert (list(found.only_tenants), list(found.never_tenants)) == (["a", "b"], ["c"])
    assert list(found.requirements) == ["evaluation", "load"]
    assert (found.ttft_p95_max_s, found.error_share_max) == (0.5, 0.02)


def test_options_that_are_not_given_stay_absent() -> None:
    """The control plane fills its defaults in, so a later default needs no later command."""
    found = made()
    assert not found.steps_percent
    assert not any(found.HasField(name) for name in ("bake", "bake_max", "keep_old"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"to": ""}, "--to = '' is no name: allowed are 1 to 256 printable bytes."),
        ({"to": "x" * 257}, "is no name: allowed are 1 to 256 printable bytes."),
        (
            {"baseline": "next"},
            '--baseline = "next" is the pool of --to: allowed is another pool, of the stable version.',
        ),
        ({"steps": "1,5,3,100"}, f"--steps = 1,5,3,100 has 3 after 5: {STEPS}"),
        ({"steps": "5,5,100"}, f"--steps = 5,5,100 has 5 after 5: {STEPS}"),
        ({"steps": "1,5"}, f"--steps = 1,5 ends with 5: {STEPS}"),
        ({"steps": "0,100"}, f"--steps = 0,100 has 0: {STEPS}"),
        ({"steps": "50,101"}, f"--steps = 50,101 has 101: {STEPS}"),
        ({"steps": "1;100"}, f'--steps = 1;100 has "1;100": {STEPS}'),
        ({"steps": "1,,100"}, f'--steps = 1,,100 has "": {STEPS}'),
        ({"steps": "-1,100"}, f'--steps = -1,100 has "-1": {STEPS}'),
        ({"steps": ",".join(map(str, range(1, 18)))}, f"--steps has 17 steps: {STEPS}"),
        ({"expect": "equal"}, '--expect = "equal" is unknown: allowed are exact and different.'),
        (
            {"on_inconclusive": "stop"},
            '--on-inconclusive = "stop" is unknown: allowed are rollback and pause.',
        ),
        ({"bake": "2"}, '--bake = "2" is no duration: allowed are 10s to 24h, written like 90s, 30m or 2h.'),
        ({"bake": "9s"}, "--bake = 9s is out of range: allowed are 10s to 24h, written like 90s, 30m or 2h."),
        ({"bake_max": "169h"}, "--bake-max = 169h is out of range: allowed are 10s to 168h, written like"),
        (
            {"bake": "1h", "bake_max": "30m"},
            "--bake-max = 30m is too short for --bake = 1h: allowed are 3610s to 168h.",
        ),
        ({"bake": "1h", "bake_max": "1h"}, "--bake-max = 1h is too short for --bake = 1h"),
        ({"keep_old": "forever"}, '--keep-old = "forever" is no duration: allowed are 10s to 168h'),
        ({"only": "a,b"}, '--only = "a,b" is unknown: allowed is tenant=NAME, with commas for several.'),
        ({"only": "tenant="}, '--only = "tenant=" is unknown'),
        ({"never": "tenant=a,,b"}, '--never = "tenant=a,,b" is unknown'),
        (
            {"only": "tenant=a,b", "never": "tenant=b"},
            "--only and --never both name b: allowed is each tenant",
        ),
        ({"require": ("a", "a")}, '--require = "a" is given twice: allowed is each name once.'),
        ({"require": ("",)}, "--require = '' is no name"),
        ({"ttft_p95_max_s": -1.0}, "--ttft-p95-max = -1 is out of range: allowed are 0 (none) to 3600 s."),
        ({"ttft_p95_max_s": float("nan")}, "--ttft-p95-max = nan is out of range"),
        ({"error_share_max": 1.5}, "--error-share-max = 1.5 is out of range: allowed are 0 (none) to 1."),
    ],
)
def test_each_mistake_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    """It names the option, the value and the allowed values."""
    with pytest.raises(BadOption) as refused:
        made(**options)
    assert sentence in str(refused.value)


def test_names_and_reasons_are_bounded() -> None:
    """A control character in a name would format a terminal."""
    assert check_name("NAME", "decode-0") == "decode-0"
    with pytest.raises(BadOption, match=r"NAME = 'a\\nb' is no name"):
        check_name("NAME", "a\nb")
    assert check_reason("r" * 200)
    with pytest.raises(BadOption, match="--reason has 201 characters: allowed are up to 200"):
        check_reason("r" * 201)


def test_ranges_are_those_of_the_control_plane() -> None:
    """A command that allowed more would promise what is refused; one that allowed less would hide a setting."""
    server = pytest.importorskip("controlplane.rollouts.settings")
    for name in ("STEPS_MAX", "BAKE_RANGE_S", "BAKE_MAX_RANGE_S", "BAKE_REST_S", "KEEP_OLD_RANGE_S"):
        assert getattr(checked, name) == getattr(server, name), name
    assert server.TTFT_P95_RANGE_S[1] == checked.TTFT_P95_S_MAX


def test_every_setting_has_an_option() -> None:
    """A field of the message without an option could not be set."""
    assert len(pb.RolloutSettings.DESCRIPTOR.fields) == len(dataclasses.fields(StartOptions))
