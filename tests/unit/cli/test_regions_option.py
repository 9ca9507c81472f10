"""`kvmesh generate --regions`: the home region answers, and mistakes are one sentence."""

from __future__ import annotations

import io

import pytest

from kvmesh.bad_option import BadOption
from kvmesh.cli.generate import generate
from kvmesh.cli.main import main
from kvmesh.cli.regions_option import regions_given
from kvmesh.inference.v1 import inference_pb2 as inference
from tests.unit.cli.test_commands import frontend


def test_the_option_gives_the_frontends_of_each_region() -> None:
    """Regions are separated by semicolons, addresses by commas."""
    found = regions_given("eu=a:1,b:2; us=[::1]:3", "us")
    assert found == {"eu": ["a:1", "b:2"], "us": ["[::1]:3"]}


@pytest.mark.parametrize(
    ("text", "prefer", "words"),
    [
        ("a:1,b:2", "eu", r'--regions = "a:1,b:2": regions such as "eu=.*" are allowed\.'),
        ("eu=a:1;", "eu", r'--regions = "eu=a:1;": regions such as'),
        ("eu=a:1,us=b:1", "eu", r'"a:1,us=b:1" is no list of addresses: regions such as'),
        ("eu=a:1;eu=b:1", "eu", r"names the region eu twice: once is allowed\."),
        ("eu=a:1;us=", "eu", r"region us is empty: 1 frontend or more is needed\."),
        (
            "eu=a:1;us=b",
            "eu",
            r"address of region us is 'b': host:port with a port of 1 to 65535 is allowed\.",
        ),
        ("eu=a:1;us=a:1", "eu", r"address 'a:1' is in the regions eu and us: one region is allowed\."),
        ("eu=a:1;us=b:1", "asia", r"prefer is 'asia': one of eu, us is allowed\."),
        ("eu=a:1;us=b:1", "", r"prefer is '': one of eu, us is allowed\."),
    ],
)
def test_a_mistake_names_the_option_and_the_allowed_values(text: str, prefer: str, words: str) -> None:
    """The text names what is wrong, and nothing is sent."""
    with pytest.raises(BadOption, match=words):
        regions_given(text, prefer)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--regions", "eu=a:1", "--prefer", "eu", "--address", "a:1"],
        ["--prefer", "eu"],
        ["--regions", "eu=a:1", "--prefer", "us"],
    ],
)
def test_options_that_contradict_each_other_are_refused(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 2, and stderr has one sentence."""
    with pytest.raises(SystemExit) as ended:
        main(["generate", *arguments, "x"])
    assert ended.value.code == 2
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("own_region", ["", "eu"])
async def test_a_region_without_frontends_may_be_drained(
    own_region: str, free_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The refused connection says nothing of the drain."""
    request = inference.GenerateRequest(text="x")
    code = await generate([f"127.0.0.1:{free_port}"], request, 5, as_json=False, own_region=own_region)
    errors = capfd.readouterr().err
    assert code == 1 and errors.startswith("No frontend answers at ")
    assert ("Region eu may be drained: see `kvmesh region list`." in errors) is bool(own_region)


async def test_generate_reaches_another_region_without_home(
    free_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """No process listens at home: the other region answers. The explanation tells that it is about the second call."""
    request = inference.GenerateRequest(text="x", options=inference.GenerateOptions(explain=True))
    notes = []
    async with frontend() as (address, _):
        regions = {"eu": [f"127.0.0.1:{free_port}"], "us": [address]}
        for home in ("eu", "us"):
            out = io.StringIO()
            code = await generate([], request, 10, as_json=False, out=out, regions=regions, prefer=home)
            assert (code, out.getvalue()) == (0, "It wäs dark\n")
            notes.append("sent the request 2 times" in capfd.readouterr().err)
    assert notes == [True, False]
