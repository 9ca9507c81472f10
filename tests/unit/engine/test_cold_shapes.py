"""Cold shapes: the shapes of a step, the steps that pay, and the count in the load report."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from engines.contract.request import RequestKind
from engines.reference.cold_shapes import ColdShapes, Shape, shapes_of
from engines.reference.config import EngineConfig, from_json
from engines.reference.cost_model import CostModel
from tests.unit.engine.driver import CONFIG, Driver, request_of


def test_a_shape_is_the_power_of_two_at_or_above_the_rows() -> None:
    """Prompt rows and decode rows are two shapes; without rows there is none."""
    for rows in range(1, 600):
        ((prefill, size),), ((decode, other),) = shapes_of(rows, 0), shapes_of(0, rows)
        assert (prefill, decode) == ("prefill", "decode") and size == other
        assert math.log2(size).is_integer() and size / 2 < rows <= size
    assert shapes_of(0, 0) == () and shapes_of(128, 3) == (("prefill", 128), ("decode", 4))
    assert len({shapes_of(rows, 0) for rows in range(1, 129)}) == 8


@pytest.mark.parametrize("seed", range(20))
def test_each_shape_is_cold_in_its_first_runs_and_a_step_pays_once(seed: int) -> None:
    """A step pays if one of its shapes ran fewer than `cold_runs` times before, whatever the order of the steps."""
    rng = random.Random(seed)
    runs_max, shapes = rng.randrange(4), ColdShapes(1.5, 0)
    shapes.cold_runs = runs_max
    before: list[Shape] = []
    paid = 0
    for _ in range(300):
        step = shapes_of(rng.choice((0, rng.randrange(1, 130))), rng.choice((0, rng.randrange(1, 9))))
        is_cold = any(before.count(shape) < runs_max for shape in step)
        assert shapes.extra_s(step) == shapes.extra_s(step) == (1.5 if is_cold else 0.0), f"seed={seed}"
        shapes.record(step)
        before += step
        paid += is_cold
        assert shapes.steps_total == paid, f"seed={seed}"
    assert (paid > 0) == (runs_max > 0)


def test_nothing_is_cold_by_default() -> None:
    """Without `cold_s` no step costs more, and the load report counts 0 cold steps."""
    driver = Driver(CONFIG)
    driver.core.submit(request_of(2, np.arange(9, dtype=np.int32), 5))
    assert driver.core.cost_s(driver.core.plan(1), CostModel(step_s=0.25)) == 0.25
    while driver.step():
        pass
    assert driver.core.load().cold_steps_total == 0


def test_the_engine_is_cold_after_boot_and_warm_after_the_runs_of_each_shape() -> None:
    """The duration of steps has `cold_s` while a shape is cold; another shape is cold again; tokens do not change."""
    config = replace(CONFIG, cold_s=2.0, cold_runs=2, prefix_reuse=False)
    driver, costs = Driver(config), CostModel(step_s=0.5)

    def costs_of(key: int, prompt: int, output: int) -> list[float]:
        driver.core.submit(request_of(key, np.arange(key, key + prompt, dtype=np.int32), output))
        seconds = []
        while plan := driver.core.plan(1):
            seconds.append(driver.core.cost_s(plan, costs))
            driver.step()
        return seconds

    assert costs_of(2, 5, 4) == [2.5, 2.5, 2.5, 0.5]  # ("prefill", 8), then ("decode", 1) three times
    assert costs_of(4, 8, 3) == [2.5, 0.5, 0.5]
    assert costs_of(6, 7, 3) == [0.5, 0.5, 0.5]
    assert costs_of(8, 9, 2) == [2.5, 0.5]  # another prefill shape
    assert driver.core.load().cold_steps_total == 5
    warm = Driver(replace(config, cold_s=0.0))
    warm.core.submit(request_of(2, np.arange(2, 7, dtype=np.int32), 4))
    while warm.step():
        pass
    assert warm.answers[2].tokens == driver.answers[2].tokens


def test_a_step_with_prompt_and_decode_rows_runs_both_shapes() -> None:
    """The mixed step pays once, and both its shapes have run then."""
    driver = Driver(replace(CONFIG, cold_s=1.0, cold_runs=1))
    driver.core.submit(request_of(2, np.arange(4, dtype=np.int32), 6))
    driver.step()
    driver.core.submit(request_of(4, np.arange(20, 22, dtype=np.int32), 1, RequestKind.CONTEXT_ONLY))
    driver.step()
    assert driver.core.load().cold_steps_total == 2
    plan = driver.core.plan(1)
    assert driver.core.cost_s(plan, CostModel()) == 0.0
    driver.step()
    assert driver.core.load().cold_steps_total == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cold_s": -0.1}, "cold_s must be 0..60, got -0.1"),
        ({"cold_s": 60.5}, "cold_s must be 0..60, got 60.5"),
        ({"cold_s": math.nan}, "cold_s must be 0..60, got nan"),
        ({"cold_runs": -1}, "cold_runs must be 0..100, got -1"),
        ({"cold_runs": 101}, "cold_runs must be 0..100, got 101"),
        (
            {"arithmetic": "transformer", "cold_s": 1.0},
            "cold_s must be 0 unless arithmetic is hashed, got 1.0",
        ),
    ],
)
def test_a_bad_setting_is_refused_with_name_value_and_range(
    settings: dict[str, object], message: str
) -> None:
    """The engine does not start."""
    with pytest.raises(ValueError) as caught:
        EngineConfig(**{"arithmetic": "hashed"} | settings)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_the_limits_are_allowed_and_reach_the_model() -> None:
    """The launcher passes the settings to the model as JSON."""
    for config in (EngineConfig("hashed", cold_s=60.0, cold_runs=100), EngineConfig("transformer")):
        assert from_json(config.to_json()) == config
