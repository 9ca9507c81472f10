"""The registered address for a listen address."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from engines.reference import serve
from engines.reference.advertise import kv_address
from engines.reference.config import EngineConfig
from kvmesh import advertise
from kvmesh.advertise import advertised, split
from kvmesh.config import ConfigError
from kvmesh.replica import options
from services.frontend import main as frontend
from services.router import main as router

LOCAL_REDIS = "redis://127.0.0.1:6379/0"


@pytest.fixture
def no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a name that resolves to its loopback only, as on many Debian machines."""
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")


@pytest.mark.parametrize(
    ("listen", "option", "bound", "registered"),
    [
        ("10.9.0.4:7000", "", "10.9.0.4:7000", "10.9.0.4:7000"),
        ("127.0.0.1:0", "", "127.0.0.1:40123", "127.0.0.1:40123"),
        ("0.0.0.0:7000", "router-0:7000", "0.0.0.0:7000", "router-0:7000"),
        ("0.0.0.0:7000", "192.0.2.7:17000", "0.0.0.0:7000", "192.0.2.7:17000"),
        ("[::]:7000", "[2001:db8::7]:7000", "[::]:7000", "[2001:db8::7]:7000"),
        ("[::1]:7000", "", "[::1]:7000", "[::1]:7000"),
        ("0.0.0.0:7000", "", "0.0.0.0:7000", "127.0.0.1:7000"),
    ],
)
def test_the_registered_address(listen: str, option: str, bound: str, registered: str) -> None:
    """The option wins, then the listen address. For a wildcard it is the address on the route to Redis."""
    assert advertised(listen, option or None, LOCAL_REDIS).address(bound) == registered


def test_a_wildcard_takes_the_address_on_the_route_to_a_sentinel() -> None:
    """To the first one whose name is known: the master's address may change."""
    url = "redis+sentinel://mesh:pw@no-such-host.invalid,127.0.0.1:26379/service"
    assert advertised("0.0.0.0:7", None, url).address("0.0.0.0:7") == "127.0.0.1:7"


def test_a_wildcard_takes_the_hosts_name_if_redis_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis may start later, and its name is unknown until then."""
    monkeypatch.setattr(advertise, "_towards", lambda _: "")
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.9.0.4")
    assert advertised("0.0.0.0:7", None, "redis://redis:6379").address("0.0.0.0:7") == "10.9.0.4:7"


@pytest.mark.usefixtures("no_name")
def test_an_address_that_peers_cannot_dial_is_refused() -> None:
    """Its registration would succeed here and fail at every peer."""
    for redis_url in ("redis://no-such-host.invalid:6379", "nonsense", "redis://[half"):
        with pytest.raises(ConfigError, match=r"0\.0\.0\.0:7000.*give --advertise HOST:PORT"):
            advertised("0.0.0.0:7000", None, redis_url)


@pytest.mark.parametrize("option", ["0.0.0.0:7000", "[::]:7000", ":7000", "*:7000"])
def test_a_wildcard_cannot_be_advertised(option: str) -> None:
    """A wildcard leads every peer to itself."""
    with pytest.raises(ConfigError, match="no address that peers can dial"):
        advertised("0.0.0.0:7000", option, LOCAL_REDIS)


@pytest.mark.parametrize(
    "address", ["", "host", "host:", "host:x", "host:-1", "host:65536", "2001:db8::7:80", "a:7²", "a b:7"]
)
def test_a_malformed_address_is_named(address: str) -> None:
    """The sentence has option, value and allowed form."""
    with pytest.raises(ConfigError, match=r"--advertise = .* is not HOST:PORT with a port of 0 to 65535"):
        split(address, "--advertise")


@pytest.mark.parametrize("option", ["", "host:0", "host:65536"])
def test_an_advertised_address_has_a_port_of_its_own(option: str) -> None:
    """An empty option shows an unset variable, and does not mean the default."""
    with pytest.raises(ConfigError, match=r"--advertise = .* is not HOST:PORT with a port of 1 to 65535"):
        advertised("0.0.0.0:7000", option, LOCAL_REDIS)


def test_every_service_takes_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    """The four commands read the option, and answer a wrong value with one sentence and status 2."""
    given = ["--listen", "0.0.0.0:7000", "--advertise", "nowhere", "--redis", LOCAL_REDIS]
    assert router.main(given) == 2
    with pytest.raises(SystemExit) as exited:
        frontend.main(given)
    assert exited.value.code == 2
    assert capsys.readouterr().err.count('--advertise = "nowhere" is not HOST:PORT') == 2
    replica = [*given, "--id", "decode-0", "--engine", "127.0.0.1:9001"]
    with pytest.raises(ConfigError):
        options.parse("decode", replica)
    replica[replica.index("nowhere")] = "decode-0:7000"
    assert options.parse("decode", replica).advertise.address("0.0.0.0:7000") == "decode-0:7000"


def test_the_engine_states_the_address_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode pulls from the address that prefill registered, which comes from the engine."""
    assert kv_address("127.0.0.1", 9003, "") == "127.0.0.1:9003"
    assert kv_address("0.0.0.0", 9003, "prefill-0-engine:9003") == "prefill-0-engine:9003"
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.9.0.5")
    assert kv_address("0.0.0.0", 9003, "") == "10.9.0.5:9003"
    config = EngineConfig("hashed", host="0.0.0.0", kv_port=9003, kv_advertise="10.9.0.5:9003")
    assert config.kv_address == "10.9.0.5:9003"


def test_the_kv_port_may_listen_elsewhere_than_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton on the loopback of a pod, and the KV port on its address."""
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.9.0.5")
    ports = [word for kind in ("grpc", "http", "metrics", "kv") for word in (f"--{kind}-port", "9003")]
    given = ["--arithmetic", "hashed", "--host", "127.0.0.1", *ports]
    both = serve.config_of(serve.parser().parse_args(given))
    assert (both.host, both.kv_address) == ("127.0.0.1", "127.0.0.1:9003")
    apart = serve.config_of(serve.parser().parse_args([*given, "--kv-host", "0.0.0.0"]))
    assert (apart.host, apart.kv_address) == ("0.0.0.0", "10.9.0.5:9003")


@pytest.mark.usefixtures("no_name")
def test_the_engine_refuses_addresses_that_cannot_be_dialed() -> None:
    """A handoff with such an address would fail at each pull."""
    with pytest.raises(ValueError, match="set --advertise HOST:PORT"):
        kv_address("0.0.0.0", 9003, "")
    for option in ("x", "x:0", "x:65536", ":1", "0.0.0.0:1", "[::]:1"):
        with pytest.raises(ValueError, match="advertise must be HOST:PORT"):
            kv_address("0.0.0.0", 9003, option)


def test_the_readme_names_the_option() -> None:
    """An operator finds the option for engines in containers there."""
    page = Path(__file__).parents[3] / "engines" / "reference" / "README.md"
    assert "`--advertise`" in page.read_text(encoding="utf-8")
