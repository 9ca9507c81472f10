"""`kvmesh tenants` on a real Redis: output, changes and error messages for an operator."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from redis import Redis as SyncRedis

from kvmesh.buckets.ledger import Ledger
from kvmesh.buckets.operations import Granted, Reserve
from kvmesh.cli.main import main
from kvmesh.config import load
from kvmesh.errors import MeshError
from kvmesh.redis_binary import redis_binaries
from kvmesh.redis_link import RedisLink
from kvmesh.redis_url import VARIABLE
from kvmesh.tenants.catalogue import Catalogue
from kvmesh.tenants.store import CatalogueStore

CONFIG = f"""
[classes.batch]
priority_class = 1
[organisations.acme]
tokens_per_min = 60_000
[tenants.search]
organisation = "acme"
concurrency = 4
[tenants.mail]
[keys.search-prod]
tenant = "search"
sha256 = "{"0" * 64}"
requests_per_min = 600
"""

pytestmark = pytest.mark.parametrize("redis_server", redis_binaries()[:1], indirect=True, ids=["redis"])
"""One kind of Redis is enough: the tests of the store use all kinds."""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "kvmesh.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def kvmesh(
    config: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run `kvmesh tenants` with arguments; return status, stdout, stderr."""
    monkeypatch.setenv(VARIABLE, redis_url)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["tenants", *arguments, "--config", str(config), "--data-dir", str(config.parent)])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def followed(config: Path, url: str) -> Catalogue:
    """Return the tenants of a frontend after its next poll."""

    async def look() -> Catalogue:
        link = RedisLink(url)
        store = CatalogueStore(link, load(config))
        await store.poll()
        await link.close()
        return store.catalogue

    return asyncio.run(look())


def test_changes_reach_frontends_and_are_shown(kvmesh: Run, config: Path, redis_url: str) -> None:
    """Several keys at once; an empty value restores the value of the file."""
    status, out, _ = kvmesh("set", "search", "concurrency=9", "weight=2.5", "class=batch", "strict=true")
    assert status == 0
    assert "concurrency = 9" in out
    caller = followed(config, redis_url).caller("search")
    assert caller is not None
    assert (caller.tenant.weight, caller.service_class.priority_class, caller.tenant.is_strict) == (
        2.5,
        1,
        True,
    )
    assert caller.tenant.limit.concurrency == 9
    assert kvmesh("set", "search", "concurrency=", "--json")[0] == 0
    caller = followed(config, redis_url).caller("search")
    assert caller is not None
    assert (caller.tenant.limit.concurrency, caller.tenant.weight) == (4, 2.5)
    assert kvmesh("set", "organisation:acme", "tokens_per_min=30000")[0] == 0
    assert kvmesh("set", "key:search-prod", "requests_per_min=60")[0] == 0
    use = json.loads(kvmesh("show", "search", "--json")[1])["use"]
    assert {each["scope"]: each["limits"]["tokens_per_min"] for each in use}["organisation:acme"] == 30000


def test_a_limit_of_zero_is_shown_as_no_limit(kvmesh: Run, config: Path, redis_url: str) -> None:
    """Setting 0 removes the limit, and the output says so: text for people, the number for programs."""
    status, out, _ = kvmesh("set", "search", "concurrency=0", "tokens_per_min=0", "weight=2")
    assert status == 0
    assert out.startswith("tenant search: concurrency: no limit, tokens_per_min: no limit, weight = 2.")
    shown = kvmesh("show", "search")[1]
    assert "concurrency: no limit" in shown
    for name in ("requests_per_min", "tokens_per_min", "concurrency"):
        assert re.search(rf"{name}\W+no limit", shown), name
    assert kvmesh("list")[1].count("none") == 6
    limits = json.loads(kvmesh("show", "search", "--json")[1])["limits"]
    assert (limits["concurrency"], limits["tokens_per_min"]) == (0, 0)


def test_a_deleted_key_is_gone_at_frontends(kvmesh: Run, config: Path, redis_url: str) -> None:
    """The caller is unknown, no list has the key, it cannot be changed, and its name is free again."""
    _, secret, _ = kvmesh("key", "mail", "--name", "mail-1")
    assert kvmesh("disable", "key:mail-1")[0] == 0
    status, out, _ = kvmesh("key", "mail", "--name", "mail-1", "--delete")
    assert (status, out) == (
        0,
        "Key mail-1 of mail is deleted. Running frontends refuse it within two seconds.\n",
    )
    catalogue = followed(config, redis_url)
    assert catalogue.problems == ()
    with pytest.raises(MeshError, match="CREDENTIALS_UNKNOWN"):
        catalogue.identify(secret.strip(), (), None)
    assert "mail-1" not in kvmesh("show", "mail")[1]
    assert kvmesh("enable", "key:mail-1")[0] == 2
    _, again, _ = kvmesh("key", "mail", "--name", "mail-1")
    assert followed(config, redis_url).identify(again.strip(), (), None).key == "mail-1"


def test_disabled_and_enabled(kvmesh: Run, config: Path, redis_url: str) -> None:
    """A tenant and a key, separately."""
    _, secret, _ = kvmesh("key", "mail", "--name", "mail-1")
    assert kvmesh("disable", "key:mail-1")[0] == 0
    with pytest.raises(MeshError, match="TENANT_DISABLED: the key mail-1"):
        followed(config, redis_url).identify(secret.strip(), (), None)
    assert kvmesh("enable", "key:mail-1")[0] == 0
    assert kvmesh("disable", "mail")[0] == 0
    with pytest.raises(MeshError, match="TENANT_DISABLED: the tenant mail"):
        followed(config, redis_url).identify(secret.strip(), (), None)
    rows = json.loads(kvmesh("list", "--json")[1])
    assert {row["name"]: row["disabled"] for row in rows} == {"search": False, "mail": True}
    assert "disabled" in kvmesh("list")[1]
    assert kvmesh("enable", "mail")[0] == 0
    assert followed(config, redis_url).identify(secret.strip(), (), None).key == "mail-1"


def test_a_key_is_printed_once_and_kept_as_its_hash(kvmesh: Run, config: Path, redis_url: str) -> None:
    """stdout has the key alone; the printed table for the configuration means the same key."""
    status, out, err = kvmesh("key", "search", "--gateway", "--name", "edge")
    secret = out.strip()
    assert status == 0
    assert secret.startswith("kvm_")
    assert len(secret) == 47
    assert secret not in err
    assert f"{redis_url} keeps its hash. Frontends on this Redis accept the key within two seconds." in err
    for shown in (kvmesh("show", "search"), kvmesh("show", "search", "--json"), kvmesh("list", "--json")):
        assert secret not in shown[1] + shown[2]
    assert "edge" in kvmesh("show", "search")[1]
    catalogue = followed(config, redis_url)
    assert catalogue.identify(secret, (), "mail").tenant.name == "mail"
    config.write_text(config.read_text() + err[err.index("[keys.edge]") :])
    assert sha256(secret.encode()).hexdigest() in config.read_text()
    assert followed(config, redis_url).problems == ()
    assert Catalogue(load(config)).identify(secret, (), None).key == "edge"
    assert kvmesh("key", "mail")[1] != kvmesh("key", "mail")[1]


def test_live_use_is_that_of_the_ledger(kvmesh: Run, config: Path, redis_url: str) -> None:
    """Reserved tokens are missing from all scopes that they were taken from."""
    caller = Catalogue(load(config)).caller("search")
    assert caller is not None

    async def reserve() -> Any:
        link = RedisLink(redis_url)
        answers = await Ledger(link, "kvmesh").run([Reserve(caller.account, "r1", 4000, 60.0)])
        await link.close()
        return answers[0]

    assert isinstance(asyncio.run(reserve()), Granted)
    found = json.loads(kvmesh("show", "search", "--json")[1])
    use = {each["scope"]: each for each in found["use"]}
    assert use["tenant:search"]["slots"] == 1
    assert 6000 <= use["organisation:acme"]["tokens"] < 10_000
    assert use["key:search-prod"]["requests"] == 100
    assert found["ledger"]["open_count"] == 1
    assert "1 of 4" in kvmesh("show", "search")[1]
    assert json.loads(kvmesh("show", "mail", "--json")[1])["use"] == []


def test_an_organisation_is_shown_with_its_tenants_and_their_use(
    kvmesh: Run, config: Path, redis_url: str
) -> None:
    """Its current limits, and the remaining tokens of each of its tenants; no other organisation."""
    config.write_text(config.read_text() + '[tenants.reports]\norganisation = "acme"\n')
    caller = Catalogue(load(config)).caller("search")
    assert caller is not None

    async def reserve() -> None:
        link = RedisLink(redis_url)
        await Ledger(link, "kvmesh").run([Reserve(caller.account, name, 2000, 60.0) for name in ("a", "b")])
        await link.close()

    asyncio.run(reserve())
    assert kvmesh("set", "organisation:acme", "concurrency=7")[0] == 0
    status, out, _ = kvmesh("show", "organisation:acme", "--json")
    found = json.loads(out)
    assert (status, found["name"], found["tenants"]) == (0, "acme", ["search", "reports"])
    assert (found["limits"]["tokens_per_min"], found["limits"]["concurrency"]) == (60_000, 7)
    assert found["changed"] == {"concurrency": 7}
    use = {each["scope"]: each for each in found["use"]}
    assert list(use) == ["organisation:acme", "tenant:search"], "reports has no limits of its own"
    assert use["tenant:search"]["slots"] == 2
    assert 6000 <= use["organisation:acme"]["tokens"] < 10_000
    assert (found["ledger"]["open_count"], found["ledger"]["held"]) == (2, 4000)
    out = kvmesh("show", "organisation:acme")[1]
    for shown in ("search, reports", "2 of 4", "4,000 tokens in 2 reservations", "concurrency = 7"):
        assert shown in out, shown


def test_an_organisation_without_limits_has_no_use(kvmesh: Run, config: Path) -> None:
    """Nothing is counted for the organisation."""
    config.write_text('[organisations.free]\n[tenants.lab]\norganisation = "free"\n')
    found = json.loads(kvmesh("show", "organisation:free", "--json")[1])
    assert (found["tenants"], found["use"], found["ledger"]) == (["lab"], [], None)
    assert "lab" in kvmesh("show", "organisation:free")[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["show", "organisation:mail"], 'NAME = "mail" is unknown: allowed are acme.'),
        (
            ["show", "key:search-prod"],
            'NAME = "key:search-prod" is not shown by itself: allowed are a tenant',
        ),
        (["show", "serch"], 'NAME = "serch" is unknown: allowed are mail, search.'),
        (["set", "serch", "weight=1"], 'NAME = "serch" is unknown'),
        (
            ["set", "search", "weight=0"],
            "tenants.search.weight = 0.0 is out of range: allowed is 0.01 to 1000.",
        ),
        (["set", "search", "weight=nan"], "tenants.search.weight = nan is out of range"),
        (
            ["set", "search", "wieght=2"],
            "Unknown key tenants.search.wieght: did you mean tenants.search.weight?",
        ),
        (["set", "search", "weight"], '"weight" is not a change: allowed is key=value'),
        (["set", "search", "concurrency=1.5"], 'tenants.search.concurrency = "1.5" is not a whole number'),
        (["set", "search", "strict=yes"], 'tenants.search.strict = "yes" is not true or false'),
        (
            ["set", "search", "class=gold"],
            'tenants.search.class = "gold" is unknown: allowed are batch, standard.',
        ),
        (["set", "search", "tokens_burst=5"], "allowed is 0 without a limit of tokens."),
        (["set", "search", "organisation=mail"], "Unknown key tenants.search.organisation"),
        (
            ["set", "org:acme", "weight=1"],
            'NAME = "org:acme" is unknown: allowed are a tenant, organisation:NAME',
        ),
        (["disable", "organisation:acme"], "Unknown key organisations.acme.disabled"),
        (["disable", "key:none"], 'NAME = "none" is unknown: allowed are search-prod.'),
        (
            ["key", "search", "--name", "A b"],
            'has the invalid name "A b": allowed are up to 64 of a-z, 0-9',
        ),
        (["key", "search", "--name", "search-prod"], '--name = "search-prod" is taken by another key'),
        (["key", "search", "--name", "none", "--delete"], '--name = "none" is not a key of search'),
        (["key", "mail", "--name", "search-prod", "--delete"], '--name = "search-prod" is not a key of mail'),
        (["key", "search", "--delete"], "--delete needs --name"),
        (
            ["key", "search", "--name", "search-prod", "--delete"],
            '--name = "search-prod" is a key of the configuration: remove [keys.search-prod] there',
        ),
    ],
)
def test_mistakes(kvmesh: Run, config: Path, redis_url: str, arguments: list[str], sentence: str) -> None:
    """One sentence with field, value and allowed range, status 2, and nothing is written."""
    status, out, err = kvmesh(*arguments)
    assert status == 2
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1
    assert followed(config, redis_url).tables == Catalogue(load(config)).tables


def test_redis_unavailable(kvmesh: Run, monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    """The limits of the file are shown, with a note that Redis is unavailable; nothing can be changed. Status 1, one
    sentence.
    """
    monkeypatch.setenv(VARIABLE, f"redis://:hidden@127.0.0.1:{free_port}/0")
    for arguments in (
        ["list", "--json"],
        ["show", "search", "--json"],
        ["show", "organisation:acme", "--json"],
        ["disable", "search"],
        ["key", "search"],
    ):
        status, out, err = kvmesh(*arguments)
        assert status == 1
        assert err.count("\n") == 1
        assert "hidden" not in err
        assert ("search" in out) == (arguments[0] in ("list", "show"))


def test_a_wrong_password_is_not_reported_as_an_outage(
    kvmesh: Run, monkeypatch: pytest.MonkeyPatch, redis_url: str, config: Path
) -> None:
    """The message names the password as the cause; neither password is shown."""
    client = SyncRedis.from_url(redis_url)
    client.config_set("requirepass", "s3cret")
    try:
        monkeypatch.setenv(VARIABLE, redis_url.replace("://", "://:hidden@"))
        status, out, err = kvmesh("key", "search")
    finally:
        client.auth("s3cret")
        client.config_set("requirepass", "")
        client.close()
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "asks for a password, or refuses the one of this URL" in err
    assert "away" not in err and "hidden" not in err


def test_a_mesh_without_tenants_says_so(kvmesh: Run, config: Path) -> None:
    """An empty table would not say whether all callers are accepted or none."""
    config.write_text("")
    status, out, err = kvmesh("list")
    assert (status, out) == (0, "")
    assert "the mesh admits all callers" in err
    assert kvmesh("key", "search")[0] == 2


def test_without_an_address_of_redis(kvmesh: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mesh runs here, and no option gives the address."""
    monkeypatch.delenv(VARIABLE)
    status, _, err = kvmesh("list")
    assert status == 2
    assert f"set ${VARIABLE} or redis.url" in err
