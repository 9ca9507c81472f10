"""The command `kvmesh conformance`: bad options and unreachable servers, and its table."""

from __future__ import annotations

import pytest

from kvmesh.cli.conformance import Run, record, summary, table
from kvmesh.cli.fitted_table import output_console
from kvmesh.cli.main import main
from kvmesh.conformance.offer import Offer
from kvmesh.conformance.trial import Settings
from kvmesh.conformance.verdict import Outcome, Row, Verdict
from kvmesh.triton.capabilities import Capabilities

CLOSED = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--triton", "nowhere"), '--triton = "nowhere" is not HOST:PORT'),
        (("--triton", ":8001"), '--triton = ":8001" has no host'),
        (("--triton", CLOSED, "--pair", CLOSED), "is the address of --triton"),
        (("--triton", CLOSED, "--metrics", "x:0"), '--metrics = "x:0" is not HOST:PORT'),
        (("--triton", CLOSED, "--vocab-size", "3"), "--vocab-size = 3 is out of range: allowed are 64"),
        (("--triton", CLOSED, "--block-tokens", "0"), "--block-tokens = 0 is out of range"),
        (("--triton", CLOSED, "--cancels", "-1"), "--cancels = -1 is out of range: allowed are 0 to 100000"),
        (("--triton", CLOSED, "--end-id", "-1"), "--end-id = -1 is out of range"),
        (
            ("--triton", CLOSED, "--only", "speed"),
            '--only = "speed" is unknown: allowed are model, streaming',
        ),
        (("--triton", CLOSED), f"The model tensorrt_llm at {CLOSED} cannot be read: "),
        ((), "Missing option '--triton'"),
    ],
)
def test_a_mistake_is_one_sentence(
    options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the exit status is 2."""
    with pytest.raises(SystemExit) as ended:
        main(["conformance", *options])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


ROWS = [
    Row("cancel", "frees", Verdict(Outcome.FAIL, "3 blocks in use"), 1.0),
    Row("seed", "repeats", Verdict(Outcome.NOT_OFFERED, "input seed is missing; fallback: none"), 0.0),
]


def test_the_table_has_each_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each check, and a count of results."""
    output_console().print(table(ROWS))
    printed = capsys.readouterr().out
    assert "3 blocks in use" in printed and "not offered" in printed
    assert summary(ROWS) == "2 checks: 1 fail, 1 not offered."


def test_the_record_has_results() -> None:
    """JSON has the same rows, and the number of fails."""
    run = Run(triton=CLOSED, model="m", sizes={}, settings=Settings())
    made = record(run, Offer("m", {}, {}, {}, True, 1, Capabilities()), ROWS)
    assert made["failed"] == 1 and [each["result"] for each in made["checks"]] == ["fail", "not offered"]
