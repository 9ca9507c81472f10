"""`kvmesh replay` from the command line to its output."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from kvmesh.bad_option import BadOption
from simulator import options
from simulator.cost import COSTS
from simulator.main import main
from simulator.measures import Measures
from simulator.options import Cache
from simulator.plot import CHARTS, COLOURS, Panel, Series, svg
from simulator.sizing import REPLICAS_MAX, Search
from tests.unit.simulator import small


def measures(goodput: float) -> Measures:
    """Return measures in which only the goodput varies."""
    return Measures(1, 1, 1, 1, 1, goodput, 0, 1, 1, 0.5)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command; return its status, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--jobs", "1"])
    seen = capsys.readouterr()
    return int(ended.value.code or 0), seen.out, seen.err


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Return a small trace in a file."""
    return str(small.write(tmp_path / "small.jsonl", small.trace(1)))


def test_a_plain_replay_sizes_and_compares(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without options, replay sizes the pool and compares the policies."""
    status, out, _ = run(capsys, trace)
    assert status == 0
    assert "150 requests" in out and "Prefill replicas for 90% of first tokens in time, kvmesh" in out
    assert "at the trace's rate, " in out and "one less" in out
    assert out.count("load 0.7") == 1 and out.count("round-robin") == 3


def test_json_has_every_figure(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON output has every row, policy and measure by name, with the spread.

    Nothing else is on stdout. The plot is an SVG picture.
    """
    plot = tmp_path / "plot.svg"
    status, out, _ = run(
        capsys,
        *(trace, "--json", "--replicas", "2,3", "--load", ".5,.9", "--cache", ".3,4GiB", "--seeds", "2"),
        *("--policies", "kvmesh,random,one-queue", "--size", "--order", "fifo", "--plot", str(plot)),
    )
    assert status == 0
    told = json.loads(out)
    assert told["requests"] == 150 and len(told["comparison"]) == 8
    assert (told["kv_bytes_per_token"], told["slo_s"], told["speed"]) == (131_072, 0.5, 1)
    first = told["comparison"][0]
    assert first["row"]["replicas"] == 2 and first["row"]["order"] == "fifo"
    assert first["policies"].keys() == {"kvmesh", "random", "one-queue"}
    assert first["policies"]["random"]["mean"].keys() == Measures.__annotations__.keys()
    assert first["policies"]["random"]["spread"]["mean_s"] > 0 and first["policies"]["random"]["seeds"] == 2
    assert [one["cache"] for one in told["sizing"]] == ["0.3", "4GiB"]
    for one in told["sizing"]:
        assert one["tried"][str(one["replicas"])] >= 0.9
        less = one["tried"].get(str(one["replicas"] - 1))
        assert one["goodput_with_one_less"] == less
        assert (less is None) == (one["replicas"] == 1) and (less or 0) < 0.9
    picture = ET.fromstring(plot.read_text(encoding="utf-8"))
    lines = picture.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4 * len(CHARTS) * 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replicas", "0"], "--replicas = 0 is out of range: allowed are 1 to 1024."),
        (["--replicas", "2.5"], "--replicas = 2.5 is not a whole number"),
        (["--load", "high"], '--load = "high" is not a number: allowed are 0.01 to 10.'),
        (["--load", ","], '--load = "," is empty'),
        (["--replicas", ""], '--replicas = "" is empty'),
        (["--cache", ""], '--cache = "" is empty'),
        (["--replicas", "4,,8"], '--replicas = "4,,8" has an empty value beside a comma'),
        (["--policies", "kvmesh,"], '--policies = "kvmesh," has an empty value beside a comma'),
        (["--replicas", "4", "--speed", "2"], "--speed = 2 applies to sizing only: add --size."),
        (["--cache", "0GiB"], "--cache = 0 is out of range"),
        (["--cache", "0.05GiB"], "--cache = 0.05GiB holds no block: one takes 0.062 GiB."),
        (["--cache", "8GB"], "allowed are 0 to 100, a share, or GiB per replica (80GiB)."),
        (["--policies", "best"], '--policies = "best" is not a policy: allowed are kvmesh, llm-d,'),
        (["--loss", "1.5"], "--loss = 1.5 is out of range: allowed are 0 to 1."),
        (["--seeds", "0"], "--seeds = 0 is out of range"),
        (["--cost", "9b"], '--cost = "9b" is neither one of 8b, 70b nor c0,a,b'),
        (["--cost", "0,0,0"], "makes prompts free"),
        (
            ["--dispatch-ahead-s", "no"],
            '--dispatch-ahead-s = "no" is not a number: allowed are 0.01 to 60 s, or off.',
        ),
        (["--slo-s", "nan"], "--slo-s = nan is out of range"),
        (["--plot", "/no/such/folder/a.svg"], "the folder does not exist"),
        (["--plot", "/"], '--plot = "/" is a folder'),
        (["--plot", "x.png"], '--plot = "x.png" does not end in .svg'),
        (["--plot", "x"], '--plot = "x" does not end in .svg'),
    ],
)
def test_a_wrong_option_is_refused_in_one_sentence(
    trace: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """A wrong option is refused in one sentence with status 2, before the replay."""
    status, out, err = run(capsys, trace, *arguments)
    assert status == 2 and not out
    assert words in err and err.count("\n") == 1


def test_a_trace_without_time_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace with a single timestamp is refused, since it has no rate."""
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 3, "input_length": 5, "hash_ids": [1]}\n', encoding="utf-8")
    status, _, err = run(capsys, str(path))
    assert status == 2 and "all timestamps are 3" in err


def test_speed_is_stated_with_the_rate(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The table states the rate used for sizing: the trace's rate times --speed."""
    arguments = ("--policies", "kvmesh", "--load", ".5", "--cache", "4GiB")
    heading = re.compile(r"at (\d+ times |)the trace's rate, (\S+) requests/s")
    (plain,) = heading.findall(run(capsys, trace, *arguments)[1])
    (fast,) = heading.findall(run(capsys, trace, *arguments, "--speed", "3")[1])
    assert (plain[0], fast[0]) == ("", "3 times ")
    assert float(fast[1]) == pytest.approx(3 * float(plain[1]), rel=0.01)


@pytest.mark.parametrize(("speed", "is_short"), [("1", False), ("30", True)])
def test_a_short_trace_is_doubted(
    trace: str, capsys: pytest.CaptureFixture[str], speed: str, is_short: bool
) -> None:
    """A short trace gets one line of warning, also in the JSON, since queues hardly build up."""
    arguments = ("--policies", "kvmesh", "--load", ".1", "--replicas", "1", "--size", "--speed", speed)
    _, out, _ = run(capsys, trace, *arguments, "--cache", "4GiB")
    lines = [line for line in out.splitlines() if "too short" in line]
    assert len(lines) == is_short
    assert all("30 times the trace's rate" in line and "longest prefill" in out for line in lines)
    told = json.loads(run(capsys, trace, *arguments, "--cache", "4GiB", "--json")[1])
    assert len(told["warnings"]) == is_short


def test_a_row_for_which_the_trace_is_short_is_doubted(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows with more replicas are marked when the trace is too short at their request rate."""
    arguments = ("--policies", "one-queue", "--load", ".1,.5", "--replicas", "2,256")
    _, out, _ = run(capsys, trace, *arguments)
    assert out.count("Trace too short: at 256 replicas and load 0.5 ") == 1


def test_a_plot_that_cannot_be_written_does_not_lose_the_figures(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the plot cannot be written, the figures are printed first, then the error in one sentence."""
    arguments = ("--replicas", "2", "--load", ".5", "--policies", "kvmesh", "--plot", "/proc/none.svg")
    status, out, err = run(capsys, trace, *arguments)
    assert status == 2 and "load 0.5" in out
    assert err.strip() == '--plot = "/proc/none.svg" cannot be written: No such file or directory.'


def test_a_line_that_is_nested_without_end_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deeply nested JSON is refused with one sentence and no position."""
    path = tmp_path / "t.jsonl"
    path.write_text("[" * 100_000, encoding="utf-8")
    status, _, err = run(capsys, str(path))
    assert status == 2 and "t.jsonl: a line is JSON nested too deeply" in err and err.count("\n") == 1


def test_the_command_line_starts_it_by_name(tmp_path: Path) -> None:
    """`kvmesh replay` passes options, the exit status and --help through."""
    start = [sys.executable, "-m", "kvmesh.cli.main", "replay"]
    missing = str(tmp_path / "none.jsonl")
    done = subprocess.run([*start, missing], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr == f"{missing} cannot be read: No such file or directory\n"


def test_costs_are_named_or_given() -> None:
    """Cost names give the reference coefficients; other values are parsed as coefficients."""
    eight, seventy = COSTS["8b"], COSTS["70b"]
    assert eight.a_s == pytest.approx(32.4e-6, rel=0.01) and eight.b_s == pytest.approx(1.06e-9, rel=0.01)
    assert seventy.a_s == pytest.approx(79.3e-6, rel=0.01) and seventy.b_s == pytest.approx(1.47e-9, rel=0.01)
    assert eight.gib(1, 512) * 1024 == 64 and seventy.gib(1, 512) * 1024 == 160
    given = options.cost(".02,1e-4,0,65536", 3.0)
    assert given.seconds(100, 1000) == pytest.approx(0.03) and given.kv_bytes == 65536
    assert given.slo_s(1000) == 3.0 and given.slo_s(100_000) == pytest.approx(20.04)
    assert Cache(gib=1).blocks(eight, 512) == 16 and Cache(share=0.3).blocks(eight, 512) == 0
    with pytest.raises(BadOption):
        options.cache("--cache", "-1")


def test_a_search_finds_the_smallest_that_is_enough() -> None:
    """The search finds the smallest sufficient number from any start and tries each number once.

    It tries the answer and the number below it.
    """
    rng = random.Random(1)
    for _ in range(300):
        enough, first = rng.randint(1, REPLICAS_MAX), rng.randint(1, 200)
        search = Search(0.9, first)
        while (count := search.next()) is not None:
            assert count not in search.tried and 1 <= count <= REPLICAS_MAX
            search.tried[count] = measures(0.95 if count >= enough else 0.5)
        assert search.found == enough and search.measures == measures(0.95)
        assert search.goodput_with_one_less == (0.5 if enough > 1 else None)
        assert len(search.tried) <= 30
    search = Search(0.9, 3)
    while (count := search.next()) is not None:
        search.tried[count] = measures(0.1)
    assert search.found is None and REPLICAS_MAX in search.tried and search.goodput_with_one_less is None


def test_a_plot_of_one_load_is_drawn() -> None:
    """A plot of a single load is drawn; its title is escaped for XML."""
    text = svg("<&>", [Panel("4 replicas", [Series("kvmesh", [(0.7, measures(0.5))])])])
    assert ET.fromstring(text).tag.endswith("svg") and "kvmesh" in text
    assert text == svg("<&>", [Panel("4 replicas", [Series("kvmesh", [(0.7, measures(0.5))])])])


def lab(colour: str) -> tuple[float, float, float]:
    """Return the CIELAB coordinates of an sRGB colour; distances match perceived differences."""
    shares = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in shares]
    red, green, blue = linear
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883,
    )
    x, y, z = (one ** (1 / 3) if one > 0.008856 else 7.787 * one + 16 / 116 for one in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_colours_of_a_plot_are_distinguishable() -> None:
    """All colours of a plot can be distinguished; the first eight, used by a plain replay, clearly."""
    for (i, one), (j, other) in itertools.combinations(enumerate(COLOURS), 2):
        assert math.dist(lab(one), lab(other)) > (40 if max(i, j) < 8 else 30), (one, other)


def test_a_bound_is_dashed() -> None:
    """Lines of bounds, which are no policies, are dashed in the charts and in the legend."""
    points = [(0.7, measures(0.5))]
    text = svg("t", [Panel("p", [Series("kvmesh", points), Series("one-queue", points)])])
    dashed = [one.get("stroke") for one in ET.fromstring(text).iter() if one.get("stroke-dasharray")]
    assert dashed == [COLOURS[1]] * (len(CHARTS) + 1)
