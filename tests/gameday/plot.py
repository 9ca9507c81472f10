"""One run of a game day over time, as SVG: answers, where they were served, TTFT, and the regions' weights. Pure.

Equal records give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

from bench.warmups.recovery import smoothed
from simulator.plot import COLOURS
from tests.gameday.bins import BIN_S, Window
from tests.gameday.calls import BARE, CUT, FAILED, GOOD, REFUSED
from tests.gameday.records import Record

WIDTH, HEIGHT = 860, 170
LEFT, TOP, RIGHT, BOTTOM = 50, 26, 150, 22
SMOOTH: Final = 9
"""Bins of the moving mean."""

TICK_S: Final = 10

Line = tuple[str, Sequence[tuple[float, float]]]


def svg(record: Record) -> str:
    """Return the picture."""
    panels = [
        ("answers per second, by time of sending", _answers(record)),
        ("good answers per second, by serving region", _served(record)),
        ("p95 TTFT in windows of 2 s, ms", _ttft(record)),
        ("weight, and spill dashed: source>target", _weights(record)),
    ]
    height = HEIGHT * len(panels)
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, (title, drawn) in enumerate(panels):
        parts.append(f'<g transform="translate(0 {number * HEIGHT})">')
        parts += _panel(record, title, drawn)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def _panel(record: Record, title: str, drawn: Sequence[Line]) -> list[str]:
    begin_s, end_s = record.times.steady_s, record.times.ended_s
    top = max((value for _, points in drawn for _, value in points), default=0.0)
    scale = _rounded_up(top)

    def x_of(at_s: float) -> float:
        return LEFT + (at_s - begin_s) / (end_s - begin_s) * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return TOP + (1.0 - value / scale) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="{TOP - 10}">{escape(title)}</text>']
    for share in (0.0, 0.5, 1.0):
        y = y_of(share * scale)
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#dddddd"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * scale:g}</text>'
        )
    first = math.ceil(begin_s / TICK_S) * TICK_S
    parts += [
        f'<text x="{x_of(at_s):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{at_s}</text>'
        for at_s in range(int(first), int(end_s) + 1, TICK_S)
    ]
    for at_s in (0.0, record.times.heal_s, record.times.healed_s):
        x = x_of(at_s)
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#222222" stroke-dasharray="2 3"/>'
        )
    for index, (name, points) in enumerate(drawn):
        stroke = f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="1.5"'
        dashes = ' stroke-dasharray="5 3"' if ">" in name else ""
        shown = " ".join(
            f"{x_of(at_s):.1f},{y_of(value):.1f}" for at_s, value in points if begin_s <= at_s <= end_s
        )
        y = TOP + 6 + 14 * index
        parts.append(
            f'<line x1="{WIDTH - RIGHT + 8}" y1="{y}" x2="{WIDTH - RIGHT + 26}" y2="{y}" {stroke}{dashes}/>'
            f'<text x="{WIDTH - RIGHT + 31}" y="{y + 4}">{escape(name)}</text>'
        )
        if shown:
            parts.append(f'<polyline points="{shown}" fill="none" {stroke}{dashes}/>')
    return parts


def _answers(record: Record) -> list[Line]:
    kinds = (("good", (GOOD,)), ("refused, RetryInfo", (REFUSED,)), ("other", (BARE, FAILED, CUT)))
    return [(name, _rate(record, _by_bin(record, "outcomes", outcomes))) for name, outcomes in kinds]


def _served(record: Record) -> list[Line]:
    return [(region, _rate(record, _by_bin(record, "served", (region,)))) for region in record.regions]


def _by_bin(record: Record, name: str, keys: Sequence[str]) -> dict[int, int]:
    found: dict[int, int] = {}
    for each in record.bins:
        counts: Mapping[str, int] = getattr(each, name)
        found[each.at] = found.get(each.at, 0) + sum(counts.get(key, 0) for key in keys)
    return found


def _rate(record: Record, counts: Mapping[int, int]) -> list[tuple[float, float]]:
    """Return the moving mean per second."""
    first, end = math.floor(record.times.steady_s / BIN_S), math.floor(record.times.ended_s / BIN_S)
    values = smoothed([counts.get(at, 0) / BIN_S for at in range(first, end)], SMOOTH)
    return [((first + at + 0.5) * BIN_S, value) for at, value in enumerate(values)]


def _ttft(record: Record) -> list[Line]:
    made: list[Line] = []
    for home in record.regions:
        points, at_s = list[tuple[float, float]](), record.times.steady_s
        while at_s + 2.0 <= record.times.ended_s:
            value = Window(record.bins, at_s, at_s + 2.0, homes=(home,)).ttft_ms(least=1)
            if value is not None:
                points.append((at_s + 1.0, value))
            at_s += 2.0
        made.append((f"callers of {home}", points))
    return made


def _weights(record: Record) -> list[Line]:
    weights: dict[str, list[tuple[float, float]]] = {}
    for view in record.views:
        if view.by != view.region:
            weights.setdefault(f"{view.region} seen by {view.by}", []).append((view.at_s, view.weight))
            weights.setdefault(f"spill {view.by}>{view.region}", []).append((view.at_s, view.spill))
    return sorted(weights.items())


def _rounded_up(value: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least `value`."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= value)
