"""Goodput of the pool after a restart, as SVG: a panel per setting, a line per arm. Pure.

Equal records give equal bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

from bench.warmups.arms import ARM_TITLES, ARMS, SETTINGS
from bench.warmups.records import BEFORE_S, Record
from bench.warmups.recovery import smoothed
from simulator.plot import COLOURS

WIDTH, HEIGHT = 430, 270
LEFT, TOP, RIGHT, BOTTOM = 46, 34, 12, 40
COLUMNS: Final = 2
LEGEND_HEIGHT: Final = 34
SHARE_MAX: Final = 1.4
SMOOTH_S: Final = 5
"""Width of the moving mean."""


def svg(records: Sequence[Record]) -> str:
    """Return the picture. A line is the median over the repeats, of a moving mean over SMOOTH_S."""
    shown = [name for name in SETTINGS if any(each.setting == name for each in records)]
    rows = -(-len(shown) // COLUMNS)
    width, height = COLUMNS * WIDTH, LEGEND_HEIGHT + max(rows, 1) * HEIGHT
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, arm in enumerate(ARMS):
        x = LEFT + 150 * index
        parts.append(f'<line x1="{x}" y1="18" x2="{x + 22}" y2="18" {_stroke(index)}/>')
        parts.append(f'<text x="{x + 28}" y="22">{escape(ARM_TITLES[arm])}</text>')
    for number, name in enumerate(shown):
        x, y = number % COLUMNS * WIDTH, LEGEND_HEIGHT + number // COLUMNS * HEIGHT
        parts.append(f'<g transform="translate({x} {y})">')
        parts += _panel(name, [each for each in records if each.setting == name])
        parts.append("</g>")
    parts.append("</svg>\n")
    return "\n".join(parts)


def median_line(records: Sequence[Record]) -> list[float]:
    """Return the median share of the runs per second from BEFORE_S before the engine was ready.

    A run that ended earlier no longer counts: its loss was over.
    """
    lines = [smoothed(each.series, SMOOTH_S) for each in records]
    length = max(map(len, lines), default=0)
    return [statistics.median(line[at] for line in lines if at < len(line)) for at in range(length)]


def _panel(name: str, records: Sequence[Record]) -> list[str]:
    setting = SETTINGS[name]
    lines = {arm: median_line([each for each in records if each.arm == arm]) for arm in ARMS}
    longest_s = max(max(map(len, lines.values())) - BEFORE_S, 20)

    def x_of(at_s: float) -> float:
        return LEFT + (at_s + BEFORE_S) / (longest_s + BEFORE_S) * (WIDTH - LEFT - RIGHT)

    def y_of(share: float) -> float:
        return TOP + (SHARE_MAX - min(max(share, 0.0), SHARE_MAX)) / SHARE_MAX * (HEIGHT - TOP - BOTTOM)

    title = f"{setting.name}: {setting.title}; goodput over steady"
    parts = [f'<text x="{LEFT}" y="{TOP - 12}">{escape(title)}</text>']
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0, 1.25):
        y = y_of(tick)
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#dddddd"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    parts += [
        f'<text x="{x_of(at_s):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{at_s}</text>'
        for at_s in range(-BEFORE_S, longest_s + 1, 20)
    ]
    parts.append(
        f'<line x1="{x_of(0):.1f}" y1="{TOP}" x2="{x_of(0):.1f}" y2="{HEIGHT - BOTTOM}" stroke="#222222" '
        f'stroke-dasharray="2 3"/><text x="{WIDTH / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
        "seconds since the engine was ready</text>"
    )
    for index, arm in enumerate(ARMS):
        points = " ".join(
            f"{x_of(at - BEFORE_S + 0.5):.1f},{y_of(share):.1f}" for at, share in enumerate(lines[arm])
        )
        if points:
            parts.append(f'<polyline points="{points}" fill="none" {_stroke(index)}/>')
    return parts


def _stroke(index: int) -> str:
    return f'stroke="{COLOURS[index]}" stroke-width="2"'
