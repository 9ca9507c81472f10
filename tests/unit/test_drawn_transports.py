"""The draw of transports: repeatable, of the test's file alone, all choices occur, and what is fixed stays fixed."""

from __future__ import annotations

from itertools import product

from kvmesh.config import build
from tests.drawn_transports import Draw


def chosen(
    draw: Draw, test: str, tables: dict[str, dict[str, object]] | None = None
) -> tuple[str, str, bool]:
    made = draw.applied(build(tables or {}), test)
    return made.frontend.edge, made.mesh.hops, made.engine.step_frames


def test_a_draw_is_repeatable_and_of_the_file_alone() -> None:
    draw = Draw("seed")
    assert chosen(draw, "a.py::x") == chosen(draw, "a.py::y (setup)")
    assert {chosen(draw, f"{number}.py") for number in range(100)} == set(
        product(("grpcio", "batched"), ("grpcio", "batched"), (True, False))
    )
    assert any(chosen(draw, f"{number}.py") != chosen(Draw("other"), f"{number}.py") for number in range(20))


def test_options_and_explicit_settings_are_kept() -> None:
    fixed = Draw("seed", "batched", "grpcio", "off")
    assert {chosen(fixed, f"{number}.py") for number in range(20)} == {("batched", "grpcio", False)}
    tables: dict[str, dict[str, object]] = {
        "frontend": {"edge": "grpcio"},
        "mesh": {"hops": "grpcio"},
        "engine": {"step_frames": False},
    }
    assert {chosen(Draw("seed"), f"{number}.py", tables) for number in range(20)} == {
        ("grpcio", "grpcio", False)
    }
