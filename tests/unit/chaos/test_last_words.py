"""The excerpts of the kept logs that a failed run shows."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.cells import Run, short_form
from tests.chaos.judge import LIMITS
from tests.chaos.matrix import LAST_LINES, LINE_MAX, Matrix, OpenRig
from tests.chaos.records import Record, Violation


def test_the_end_of_the_log_of_each_named_part_is_shown(tmp_path: Path) -> None:
    """No other part's, no more than its last lines, and no line without end."""

    def never(folder: Path) -> None:
        raise AssertionError(folder)

    open_rig: OpenRig = never  # type: ignore[assignment]
    matrix, run = Matrix(open_rig, tmp_path, "commit", "machine", LIMITS), short_form()[0]
    folder = matrix.logs_of(run)
    folder.mkdir()
    for name in ("decode-1-engine", "decode-1", "decode-0", "router-0"):
        lines = [f"{name} says {line}" for line in range(100)]
        (folder / f"{name}.log").write_text("\n".join([*lines, "x" * 9999]), encoding="utf-8")
    told = matrix.last_words(run, _record(run, "decode-1-engine does not answer health any more"))
    assert "decode-1-engine says 99" in told and "decode-1-engine says 10" not in told
    assert "router-0" not in told and "decode-0" not in told
    assert max(map(len, told.splitlines())) == LINE_MAX
    assert len(told.splitlines()) <= 2 * (LAST_LINES + 1), "a replica beside its engine at most"
    assert matrix.last_words(run, _record(run, "SILENCE somewhere")) == ""


def _record(run: Run, what: str) -> Record:
    violations = [Violation("NOT_SERVING", what)]
    return Record(
        part=run.cell.part,
        fault=run.cell.fault,
        seed=run.seed,
        target="decode-1",
        commit="commit",
        began="",
        seconds=0.0,
        violations=violations,
    )
