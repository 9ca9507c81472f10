"""Injected faults of a running engine: from the option, from a file, and their effects on the process."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from engines.contract.request import RequestKind
from engines.contract.resident_memory import ResidentMemory
from engines.reference import fault_injector
from engines.reference.cost_model import CostModel
from engines.reference.fault_injector import POLL_S, TEXT_MAX_BYTES, FaultInjector
from engines.reference.faults import LEAK_TOTAL_MAX_BYTES, NO_FAULTS, Faults
from engines.reference.serve import config_of, parser
from tests.unit.engine.engines import CONFIG, EngineHarness, running, wait_until
from tests.unit.engine.test_publisher import Collector


def _prompt(seed: int, length: int = 20) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(16, 4096, length, dtype=np.int32)


def _of_file(path: Path) -> FaultInjector:
    return FaultInjector(f"@{path}", lambda: None, boot_s=0.0)


def _write(path: Path, text: str) -> None:
    """Replace the file as a whole: the engine reads it at any time."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    """An absent or empty file means no faults; each later text holds from the next poll on."""
    path = tmp_path / "faults"
    injector, now_s = _of_file(path), 0.0
    seen: list[Faults] = []
    for text in (None, "hang=1", "hang=1", "", "errors=0.1", None):
        if text is None:
            path.unlink(missing_ok=True)
        else:
            _write(path, text)
        before = injector.active(now_s + 0.9 * POLL_S) if now_s else NO_FAULTS
        assert before == (seen[-1] if seen else NO_FAULTS), "read before its time"
        now_s += POLL_S
        seen.append(injector.active(now_s))
    none = NO_FAULTS
    assert seen == [none, Faults(hang=1.0), Faults(hang=1.0), none, Faults(errors=0.1), none]
    assert POLL_S < 0.5


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_text("hang=7"), 'hang must be a number in 0..1, got "7"'),
        (lambda path: path.write_bytes(b"\xff\xfe"), "can't decode byte"),
        (lambda path: path.write_text(" " * (TEXT_MAX_BYTES + 1)), "must have at most 4096 bytes"),
        (_make_folder, "Is a directory"),
    ],
    ids=["bad", "bytes", "large", "folder"],
)
def test_a_bad_file_is_logged_once_and_keeps_the_last_good_faults(
    spoil: Callable[[Path], object], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that cannot be used neither stops the faults nor floods the log."""
    path = tmp_path / "faults"
    injector = _of_file(path)
    path.write_text("errors=0.5")
    assert injector.active(1.0) == Faults(errors=0.5)
    spoil(path)
    caplog.clear()
    assert all(injector.active(2.0 + second) == Faults(errors=0.5) for second in range(5))
    (record,) = caplog.records
    assert (
        record.levelno == logging.ERROR
        and message in record.getMessage()
        and str(path) in record.getMessage()
    )
    path.rmdir() if path.is_dir() else path.unlink()
    assert injector.active(9.0) == NO_FAULTS


def test_a_bad_file_at_boot_injects_nothing(tmp_path: Path) -> None:
    """Without a last good text there are no faults."""
    path = tmp_path / "faults"
    path.write_text("nonsense")
    assert _of_file(path).active(1.0) == NO_FAULTS


def test_faults_of_a_file_begin_after_boot(tmp_path: Path) -> None:
    """`begin_s` counts from boot, in a file as in an option."""
    path = tmp_path / "faults"
    path.write_text("errors=1,begin_s=30")
    for injector in (_of_file(path), FaultInjector("errors=1,begin_s=30", lambda: None, boot_s=0.0)):
        assert injector.active(29.0) == NO_FAULTS
        assert injector.active(30.0) == Faults(errors=1.0, begin_s=30.0)


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher passes a path that holds in any working directory; a text is passed unchanged."""
    monkeypatch.chdir(tmp_path)
    assert fault_injector.absolute_option("@faults") == f"@{tmp_path / 'faults'}"
    assert fault_injector.absolute_option("errors=0.1") == "errors=0.1"
    ports = [item for name in ("grpc", "http", "metrics", "kv") for item in (f"--{name}-port", "1")]
    options = parser().parse_args(["--arithmetic", "hashed", *ports, "--faults", "@faults"])
    assert config_of(options).faults == f"@{tmp_path / 'faults'}"


def test_leaked_memory_is_resident_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ended request keeps its bytes, up to a total."""
    memory, injector = ResidentMemory(), FaultInjector("leak_bytes=1", lambda: None)
    before = memory.read_bytes(0.0)
    injector.leak(8_000_000, 4)
    assert 31_000_000 <= memory.read_bytes(2.0) - before < 64_000_000
    monkeypatch.setattr(fault_injector, "LEAK_TOTAL_MAX_BYTES", 40_000_000)
    for _ in range(10):
        injector.leak(3_000_000, 1)
    assert sum(map(len, injector._leaked)) == injector._leaked_bytes == 40_000_000 < LEAK_TOTAL_MAX_BYTES


def test_resident_memory_is_read_once_a_second(tmp_path: Path) -> None:
    """The value is pages times the page size; a missing or odd file means 0, unknown."""
    statm = tmp_path / "statm"
    memory, page_bytes = ResidentMemory(statm), os.sysconf("SC_PAGE_SIZE")
    assert memory.read_bytes(0.0) == 0
    statm.write_text("900 7 1 1 0 1 0")
    assert memory.read_bytes(0.9) == 0 and memory.read_bytes(1.0) == 7 * page_bytes
    statm.write_text("900 8")
    assert memory.read_bytes(1.9) == 7 * page_bytes and memory.read_bytes(2.0) == 8 * page_bytes
    statm.write_text("odd")
    assert memory.read_bytes(3.0) == 0


def test_load_reports_have_the_resident_memory() -> None:
    """A leak shows in the load reports of the engine, without further requests."""
    with running(faults="leak_bytes=50000000") as harness:
        subscriber = Collector()
        harness.engine.subscribe_load(1, subscriber)
        wait_until(lambda: bool(subscriber.messages), "a first report")
        before = subscriber.messages[0]["resident_bytes"]
        harness.run(_prompt(1), 2)
        wait_until(
            lambda: subscriber.messages[-1]["resident_bytes"] > before + 40_000_000, "the leak is reported"
        )
        wait_until(harness.is_empty, "all blocks back")
        harness.engine.cancel(1)


@pytest.mark.parametrize("kind", [RequestKind.CONTEXT_AND_GENERATION, RequestKind.CONTEXT_ONLY])
def test_the_engine_dies_at_its_prompt(kind: RequestKind) -> None:
    """The death comes with a prompt that starts with the ids, and with no other."""
    with running(faults="die=17-23-99") as harness:
        for prompt in ([17, 23], [17, 23, 98, 99], [16, 17, 23, 99]):
            harness.run(np.array(prompt, dtype=np.int32), 2, kind)
        assert not harness.deaths
        harness.run(np.array([17, 23, 99, 5], dtype=np.int32), 2, kind)
        assert harness.deaths == ["died"]


def test_slow_steps_are_paced_by_the_factor() -> None:
    """Prompts and gaps take the factor of their simulated duration."""
    costs = CostModel(step_s=0.004, prefill_token_s=0.002)
    taken_s = {}
    for option in ("", "slow=3"):
        with running(faults=option, costs=costs) as harness:
            perf = harness.run(_prompt(1), 1).perf
            assert perf is not None
            harness.run(_prompt(2), 12)
            taken_s[option] = (perf.first_token_ns - perf.first_scheduled_ns) * 1e-9
            assert harness.engine.core.counters.step_s_ewma >= (0.012 if option else 0.004)
    assert taken_s[""] >= 0.044 and taken_s["slow=3"] >= 0.132


def _hang_all(harness: EngineHarness, path: Path) -> None:
    """Hang two requests of a running engine by its file, then cancel them."""
    open_answers = [harness.submit(_prompt(seed), 400, request_id=f"r{seed}") for seed in range(2)]
    wait_until(lambda: all(answer.output.tokens for answer in open_answers), "first tokens")
    _write(path, "hang=1")
    core = harness.engine.core
    wait_until(lambda: core.faults.hang == 1.0, "the hang is injected", timeout_s=20.0)
    steps = core.counters.steps
    late = harness.submit(_prompt(9), 4)
    wait_until(lambda: core.load().sequences_running == 3, "the late request is admitted")
    assert core.counters.steps == steps
    _write(path, "")
    wait_until(lambda: core.faults.hang == 0.0, "the idle engine reads the file", timeout_s=20.0)
    assert len(harness.run(_prompt(7), 5).tokens) == 5
    for answer in (*open_answers, late):
        assert not answer.done.is_set()
        harness.engine.cancel(answer.key)
        answer.wait()


def test_a_fault_begins_and_ends_at_a_running_engine(tmp_path: Path) -> None:
    """The file hangs a running engine; afterwards new requests run, and cancels free what hung."""
    path = tmp_path / "faults"
    with running(faults=f"@{path}", costs=CostModel(step_s=0.005), kv_blocks=256) as harness:
        _hang_all(harness, path)
        wait_until(harness.is_empty, "all blocks back")
        _write(path, "errors=1")
        wait_until(lambda: harness.engine.core.faults.errors == 1.0, "errors begin", timeout_s=20.0)
        assert harness.run(_prompt(3), 20).error == "engine fault: injected"
        _write(path, "wrong=1")
        wait_until(lambda: harness.engine.core.faults.wrong == 1.0, "wrong tokens begin", timeout_s=20.0)
        wrong = harness.run(_prompt(4), 8).tokens
        path.unlink()
        wait_until(lambda: harness.engine.core.faults == NO_FAULTS, "the file is gone", timeout_s=20.0)
        right = harness.run(_prompt(4), 8).tokens
        assert len(wrong) == 8 and wrong[0] != right[0]
        wait_until(harness.is_empty, "all blocks back")
    with running(CONFIG) as oracle:
        assert oracle.run(_prompt(4), 8).tokens == right
