"""TTFT percentiles and goodput over load, as SVG. Pure.

The SVG is written by hand. Two line charts do not justify a plotting library in every image. Equal figures give equal
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from simulator.measures import Measures
from simulator.runs import BOUND

COLOURS: Final = (
    *("#0b6e4f", "#d1495b", "#2747d9", "#edae49", "#8e2d8b", "#4fb3e8", "#8d6a43", "#222222"),
    *("#9e9e9e", "#f06fb4", "#7ab648", "#f4511e", "#7fd6c2", "#5a1f0e", "#c8b0f0", "#d8d23c"),
)
DASHED: Final = ' stroke-dasharray="6 4"'
"""Stroke of the bound, which is not a policy."""

WIDTH, HEIGHT = 420, 280
LEFT, TOP, RIGHT, BOTTOM = 58, 34, 12, 40
LEGEND_WIDTH: Final = 150


@dataclass(frozen=True, slots=True)
class Series:
    """One policy in one panel."""

    policy: str
    points: Sequence[tuple[float, Measures]]
    """By load, ascending."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One choice of replicas and cache: a row of three charts."""

    title: str
    series: Sequence[Series]


@dataclass(frozen=True, slots=True)
class _Chart:
    title: str
    unit: str
    value: Callable[[Measures], float]
    is_log: bool


CHARTS: Final = (
    _Chart("TTFT p50", "s", lambda one: one.p50_s, True),
    _Chart("TTFT p99", "s", lambda one: one.p99_s, True),
    _Chart("Goodput", "share in time", lambda one: one.goodput, False),
)


def svg(title: str, panels: Sequence[Panel]) -> str:
    """Return the picture: a row per panel, with a legend beside."""
    policies = list(dict.fromkeys(series.policy for panel in panels for series in panel.series))
    colours = {policy: COLOURS[index % len(COLOURS)] for index, policy in enumerate(policies)}
    width = len(CHARTS) * WIDTH + LEGEND_WIDTH
    height = 30 + max(len(panels) * HEIGHT, 40 + 18 * len(policies))
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for row, panel in enumerate(panels):
        for column, chart in enumerate(CHARTS):
            parts.append(f'<g transform="translate({column * WIDTH} {30 + row * HEIGHT})">')
            parts += _chart(chart, panel, colours)
            parts.append("</g>")
    for index, policy in enumerate(policies):
        y = 70 + 18 * index
        x = len(CHARTS) * WIDTH + 10
        parts.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 22}" y2="{y - 4}" {_stroke(policy, colours)}/>')
        parts.append(f'<text x="{x + 28}" y="{y}">{escape(policy)}</text>')
    parts.append("</svg>\n")
    return "\n".join(parts)


def _chart(chart: _Chart, panel: Panel, colours: dict[str, str]) -> list[str]:
    points = [(load, chart.value(seen)) for series in panel.series for load, seen in series.points]
    loads = sorted({load for load, _ in points})
    low, high, ticks = _axis([value for _, value in points], is_log=chart.is_log)
    span = (loads[-1] - loads[0]) or 1.0

    def x_of(load: float) -> float:
        inside = 0.5 if len(loads) == 1 else (load - loads[0]) / span
        return LEFT + inside * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        value = math.log10(max(value, 1e-6)) if chart.is_log else value
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<text x="{LEFT}" y="{TOP - 10}">{escape(f"{chart.title} ({chart.unit}), {panel.title}")}</text>'
    ]
    for tick in ticks:
        y = y_of(tick)
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#dddddd"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    parts += [
        f'<text x="{x_of(load):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{load:g}</text>'
        for load in loads
    ]
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">load</text>')
    for series in panel.series:
        drawn = [(x_of(load), y_of(chart.value(seen))) for load, seen in series.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        colour = colours[series.policy]
        parts.append(f'<polyline points="{path}" fill="none" {_stroke(series.policy, colours)}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in drawn]
    return parts


def _stroke(policy: str, colours: dict[str, str]) -> str:
    return f'stroke="{colours[policy]}" stroke-width="2"{DASHED if policy == BOUND else ""}'


def _axis(values: Sequence[float], *, is_log: bool) -> tuple[float, float, list[float]]:
    """Return the ends of the axis, as logarithms if `is_log`, and the positions of grid lines."""
    if not is_log:
        return 0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    low = math.floor(math.log10(max(1e-6, min(values))))
    high = math.ceil(math.log10(max(1e-6, *values)))
    if high <= low:
        high = low + 1
    steps = (1, 2, 5) if high - low <= 2 else (1,)
    ticks = [step * 10.0**power for power in range(low, high) for step in steps]
    return float(low), float(high), [*ticks, 10.0**high]
