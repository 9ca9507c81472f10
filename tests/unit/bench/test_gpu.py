"""The fit of prefill costs to timings, and the page of it, on made-up machines and on the published timings."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.gpu import findings, published
from bench.gpu.__main__ import app
from bench.gpu.form import Fit, fit, fit_steps
from bench.gpu.learning import MIXES, learn
from bench.gpu.measure import Plan
from bench.gpu.page import page
from bench.gpu.recording import Prefill, Recording, RecordingError, Step, read
from bench.gpu.shape import H100_FLOPS, LLAMA_8B
from bench.pages import NOTES
from services.router.placement.cost_model import PRIOR


def prompts(machine: Fit, seed: int, count: int = 128) -> list[Prefill]:
    """Return random prompts with their times on `machine`."""
    chance = random.Random(seed)
    sizes = [(chance.randrange(20_000), int(2 ** chance.uniform(0, 14))) for _ in range(count)]
    return [
        Prefill(cached, uncached, (machine.seconds(uncached, cached + uncached),))
        for cached, uncached in sizes
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("least", [1, 256])
def test_a_fit_finds_the_coefficients_of_a_machine(seed: int, least: int) -> None:
    """A fit finds any coefficients. With a floor, only the fit that has the floor does."""
    chance = random.Random(seed)
    machine = Fit(chance.uniform(1e-3, 0.05), chance.uniform(5e-6, 3e-4), chance.uniform(1e-10, 1e-8), least)
    timed = prompts(machine, seed)
    found = fit(timed, least)
    assert (found.c0_s, found.a_s, found.b_s) == pytest.approx(
        (machine.c0_s, machine.a_s, machine.b_s), rel=1e-6
    )
    assert found.errors(timed).worst < 1e-6
    if least > 1:
        assert fit(timed).errors(timed).worst > 0.05


@pytest.mark.parametrize("seed", range(5))
def test_no_coefficient_is_negative(seed: int) -> None:
    """Times that fall with size, or have nothing to do with it, are fitted badly but not absurdly."""
    chance = random.Random(seed)
    timed = [Prefill(0, 2**power, (chance.uniform(0.01, 0.1) / 2**power,)) for power in range(12)]
    found = fit(timed)
    assert min(found.c0_s, found.a_s, found.b_s) >= 0.0


def test_the_model_needs_no_learning_on_the_machine_it_assumes_and_little_elsewhere() -> None:
    """On a machine like the prior it is right from the start; on one three times slower after some prefills."""
    same = Fit(*PRIOR)
    slower = Fit(3 * PRIOR[0], 3 * PRIOR[1], 3 * PRIOR[2])
    asked = [Prefill(0, 16_384, (slower.seconds(16_384, 16_384),))]
    at_home = learn([prompts(same, seed) for seed in range(3)], [])
    abroad = learn([prompts(slower, seed) for seed in range(3)], asked)
    assert at_home.after[0].worst < 1e-9
    assert at_home.after[50].worst < 0.02
    assert abroad.after[0].median == pytest.approx(2 / 3)
    assert abroad.after[50].worst < 0.05
    assert abs(abroad.beyond[16_384]) < 0.05


def test_an_unknown_floor_spoils_estimates_of_unseen_sizes() -> None:
    """Up to 2,048 tokens it fits well enough, and is far off at 16,384; counted as 256 it is not."""
    machine = Fit(2e-3, 17e-6, 1e-9, 256)
    chance = random.Random(3)
    sizes = [int(2 ** chance.uniform(4, 11)) for _ in range(128)]
    seen = [Prefill(0, size, (machine.seconds(size, size),)) for size in sizes]
    asked = [Prefill(0, 16_384, (machine.seconds(16_384, 16_384),))]
    assert learn([seen], asked).beyond[16_384] > 0.5
    assert abs(learn([seen], asked, least=256).beyond[16_384]) < 0.2


def test_steps_are_fitted_by_streams_and_context() -> None:
    """A machine that is a line is found; one constant is off by the square root of the extremes."""
    steps = [
        Step(batch, context, (0.006 + 1e-5 * batch + 4e-8 * batch * context,))
        for batch in (1, 8, 64)
        for context in (128, 4096)
    ]
    found = fit_steps(steps)
    assert (found.base_s, found.stream_s, found.token_s) == pytest.approx((0.006, 1e-5, 4e-8))
    assert found.errors.worst < 1e-9
    extremes = steps[-1].median_s / steps[0].median_s
    assert found.constant_errors.worst == pytest.approx(extremes**0.5 - 1)


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Every number is the same."""
    made = Recording(
        "card",
        {"gpu": "card"},
        (Prefill(128, 64, (0.01, 0.02)),),
        (Prefill(0, 64, (0.03,)),),
        (Step(2, 128, (0.004,)),),
    )
    file = tmp_path / "gpu.json"
    file.write_text(made.to_json())
    assert read(file) == made


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "not a recording"),
        ('{"name": "x", "about": {}, "prefills": [], "sequence": []}', "'steps'"),
        (
            '{"name": "x", "about": {}, "prefills": [{"cached": -1, "uncached": 1, "seconds": [1]}]}',
            "cached -1 must be >= 0",
        ),
        (
            '{"name": "x", "about": {}, "prefills": [{"cached": 0, "uncached": 1, "seconds": [0]}]}',
            "must be at least one, all > 0",
        ),
    ],
)
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, text: str, told: str) -> None:
    """The sentence names the file and what is wrong."""
    file = tmp_path / "gpu.json"
    file.write_text(text)
    with pytest.raises(RecordingError, match=told):
        read(file)


def test_commands_name_the_missing_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without PyTorch there is nothing to measure with, and a file that is not there cannot be fitted; both exit 2."""
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    measured = CliRunner().invoke(app, ["measure", str(tmp_path / "gpu.json")])
    assert (measured.exit_code, measured.output) == (2, "measuring needs PyTorch: pip install torch\n")
    fitted = CliRunner().invoke(app, ["fit", str(tmp_path / "none.json")])
    assert fitted.exit_code == 2
    assert "No such file" in fitted.output
    assert not list(tmp_path.iterdir())


def test_timed_sizes_fit_into_their_memory() -> None:
    """Every prompt of grid and sequence has room, and cached tokens are whole tiles."""
    plan = Plan()
    cases = [*plan.grid(), *plan.drawn()]
    assert all(cached + uncached <= plan.tokens_max and uncached >= 1 for cached, uncached in cases)
    assert len(plan.drawn()) == plan.sequence
    assert {bool(cached) for cached, _ in plan.drawn()} == {False, True}
    assert all(cached % 128 == 0 for cached, _ in plan.drawn())


def test_published_timings_add_up_to_whole_models() -> None:
    """No operator is missing, no size beats the card's peak, and a larger prompt does not take much less."""
    for recording in published.operators():
        for prefill in recording.prefills:
            flops = LLAMA_8B.prefill_flops(prefill.uncached, prefill.total)
            assert flops / prefill.median_s < 0.9 * H100_FLOPS
        assert recording.prefills[-1].uncached == 16_384
        times = [prefill.median_s for prefill in recording.prefills]
        assert all(later > 0.85 * earlier for earlier, later in pairwise(times))
        assert all(recording.prefills[0].median_s <= step.median_s * 1.1 for step in recording.steps)


def test_operators_add_up_as_by_hand() -> None:
    """A prompt of 4,096 tokens, one between two sizes of attention, and a step of 8 streams, from the table by hand."""
    vllm = published.operators()[0]
    prefills = {prefill.uncached: prefill.median_s for prefill in vllm.prefills}
    steps = {(step.batch, step.context): step.median_s for step in vllm.steps}
    assert vllm.name == "vLLM 0.24.0"
    assert prefills[4096] == pytest.approx(79.85e-3, abs=5e-6)
    assert prefills[257] == pytest.approx(8.15e-3, abs=5e-6)
    assert steps[8, 2048] == pytest.approx(6.95e-3, abs=5e-6)


def test_the_page_keeps_its_hand_written_end() -> None:
    """Tables are made anew, the end is kept, and a second writing changes nothing."""
    timed = tuple(prompts(Fit(0.005, 2e-5, 1e-9), 1))
    recording = Recording(
        "card", {}, timed, timed[:40], (Step(1, 128, (0.01,)), Step(8, 1024, (0.02,)), Step(2, 4096, (0.03,)))
    )
    run = {
        "command": "python -m bench.gpu fit gpu.json",
        "date": "today",
        "commit": "abc",
        "is_published": False,
        "recordings": [findings.of_recording(recording, runs=2)],
    }
    first = page(run, f"# Old\n{NOTES}\n\nBy hand.\n")
    assert first.endswith(f"{NOTES}\n\nBy hand.\n")
    assert page(run, first) == first
    assert "| card | best | 1 | 5.00 | 20.0 | 1.00 | 0% |" in first
    assert all(mix.name in first for mix in MIXES)
    assert "as it ran" in first
