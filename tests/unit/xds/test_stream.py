"""One ADS stream: examples of the protocol, and random schedules against a client that keeps its rules."""

from __future__ import annotations

from collections import deque
from random import Random

from controlplane.xds.resource_set import CLUSTER, ENDPOINTS, LISTENER, ROUTES, TYPES, ResourceSet
from controlplane.xds.stream import AdsStream, Answer, Nack, Request

SEEDS = range(200)
NAME = frozenset({"kvmesh"})


def resources(number: int, *, also: str = "") -> ResourceSet:
    """Return one resource of each type that has `number`, and another one of the name `also`."""
    names = ("kvmesh", also) if also else ("kvmesh",)
    return ResourceSet({kind: {name: f"{kind}/{name}/{number}".encode() for name in names} for kind in TYPES})


def taken(stream: AdsStream) -> list[Answer]:
    """Return all answers that are due."""
    found = []
    while (answer := stream.take()) is not None:
        found.append(answer)
    return found


def acknowledge(stream: AdsStream, answers: list[Answer], names: frozenset[str] = NAME) -> None:
    """Acknowledge `answers`."""
    for each in answers:
        assert stream.on_request(Request(each.type_url, names, each.nonce)) is None


def subscribed() -> AdsStream:
    """Return a stream with all four types, answered and acknowledged."""
    stream = AdsStream()
    stream.publish(resources(1))
    for kind in reversed(TYPES):
        stream.on_request(Request(kind, NAME))
    acknowledge(stream, taken(stream))
    return stream


def test_nothing_is_answered_before_resources_are_known() -> None:
    """An empty answer would end the calls of a client."""
    stream = AdsStream()
    stream.on_request(Request(LISTENER, NAME))
    assert stream.take() is None
    stream.publish(resources(1))
    assert [each.type_url for each in taken(stream)] == [LISTENER]


def test_changes_are_sent_make_before_break() -> None:
    """CDS, EDS, LDS, RDS, whatever the order of the requests was."""
    stream = subscribed()
    stream.publish(resources(2))
    assert [each.type_url for each in taken(stream)] == [CLUSTER, ENDPOINTS, LISTENER, ROUTES]


def test_an_acknowledgement_is_not_answered() -> None:
    """Nor are resources that have not changed."""
    stream = subscribed()
    assert taken(stream) == []
    stream.publish(resources(1))
    assert taken(stream) == []
    assert all(stream.acknowledged(kind) for kind in TYPES)


def test_only_a_type_that_has_changed_is_sent() -> None:
    """The others keep their versions."""
    stream = subscribed()
    changed = dict(resources(1).by_type)
    changed[ENDPOINTS] = {"kvmesh": b"new"}
    stream.publish(ResourceSet(changed))
    (answer,) = taken(stream)
    assert (answer.type_url, answer.resources) == (ENDPOINTS, (b"new",))


def test_a_refusal_is_returned_once_and_not_answered() -> None:
    """The client keeps its last good resources; the same version would be refused again."""
    stream = subscribed()
    stream.publish(resources(2))
    cluster, *others = taken(stream)
    acknowledge(stream, others)
    before = stream.acknowledged(CLUSTER)
    nack = stream.on_request(Request(CLUSTER, NAME, cluster.nonce, "no"))
    assert nack == Nack(CLUSTER, cluster.version, "no")
    assert taken(stream) == []
    assert stream.acknowledged(CLUSTER) == before != cluster.version
    stream.publish(resources(3))
    assert CLUSTER in [each.type_url for each in taken(stream)]


def test_a_request_with_an_older_nonce_is_ignored() -> None:
    """It was sent before the latest answer arrived, so it acknowledges nothing."""
    stream = subscribed()
    stream.publish(resources(2))
    old = taken(stream)[1]
    stream.publish(resources(3))
    new = taken(stream)[1]
    assert old.type_url == new.type_url == ENDPOINTS
    assert stream.on_request(Request(ENDPOINTS, NAME, old.nonce, "no")) is None
    assert stream.acknowledged(ENDPOINTS) not in (old.version, new.version)
    acknowledge(stream, [new])
    assert stream.acknowledged(ENDPOINTS) == new.version


def test_new_names_are_answered_and_unknown_ones_too() -> None:
    """A client learns at once that a listener or a cluster does not exist."""
    stream = AdsStream()
    stream.publish(resources(1, also="other"))
    stream.on_request(Request(LISTENER, NAME))
    (first,) = taken(stream)
    stream.on_request(Request(LISTENER, NAME | {"other"}, first.nonce))
    (second,) = taken(stream)
    assert len(second.resources) == 2
    stream.on_request(Request(LISTENER, NAME | {"other", "none"}, second.nonce))
    (third,) = taken(stream)
    assert third.resources == second.resources and third.nonce != second.nonce
    acknowledge(stream, [third], NAME | {"other", "none"})
    assert taken(stream) == []


def test_no_names_are_all_resources() -> None:
    """Envoy asks for clusters in this way; "*" says the same."""
    for names in (frozenset[str](), frozenset({"*"})):
        stream = AdsStream()
        stream.publish(resources(1, also="other"))
        stream.on_request(Request(CLUSTER, names))
        (answer,) = taken(stream)
        assert len(answer.resources) == 2
        acknowledge(stream, [answer], names)
        assert taken(stream) == []


def test_a_type_that_the_server_lacks_is_ignored() -> None:
    """Envoy may ask for secrets; it gets no answer and the stream goes on."""
    stream = subscribed()
    assert stream.on_request(Request("type.googleapis.com/other", NAME)) is None
    assert taken(stream) == []


class Client:
    """A client that keeps the rules: it acknowledges, or refuses, each answer in order and names what it wants."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.wire: deque[Answer] = deque()
        """Answers on their way."""
        self.names: dict[str, frozenset[str]] = {}
        self.nonces: dict[str, str] = {}
        self.has: dict[str, tuple[bytes, ...]] = {}
        self.nacks: set[tuple[str, str]] = set()
        """Type and version of each refused answer."""

    def start(self, kind: str) -> Request:
        """Subscribe to a type."""
        self.names[kind] = NAME
        return Request(kind, NAME)

    def widen(self, kind: str) -> Request:
        """Name one more resource, with the latest nonce that has arrived."""
        self.names[kind] |= {self.chance.choice(("other", "none"))}
        return Request(kind, self.names[kind], self.nonces[kind])

    def read(self, *, may_refuse: bool) -> Request:
        """Take the next answer from the wire and answer it."""
        answer = self.wire.popleft()
        self.nonces[answer.type_url] = answer.nonce
        if may_refuse and self.chance.random() < 0.2:
            self.nacks.add((answer.type_url, answer.version))
            return Request(answer.type_url, self.names[answer.type_url], answer.nonce, "no")
        self.has[answer.type_url] = answer.resources
        return Request(answer.type_url, self.names[answer.type_url], answer.nonce)


def test_a_client_has_what_is_in_force_once_all_is_read() -> None:
    """Random publications, subscriptions, delays and refusals."""
    for seed in SEEDS:
        chance = Random(seed)
        stream, client = AdsStream(), Client(chance)
        found: set[tuple[str, str]] = set()

        def tell(request: Request, stream: AdsStream = stream, found: set[tuple[str, str]] = found) -> None:
            nack = stream.on_request(request)
            if nack is not None:
                found.add((nack.type_url, nack.version))

        for number in range(60):
            kind, step = chance.choice(TYPES), chance.random()
            if step < 0.2:
                stream.publish(resources(number // chance.randint(1, 9), also="other"))
            elif step < 0.4 and kind not in client.names:
                tell(client.start(kind))
            elif step < 0.5 and kind in client.nonces:
                tell(client.widen(kind))
            elif step < 0.9 and client.wire:
                tell(client.read(may_refuse=True))
            client.wire.extend(taken(stream))
        assert found <= client.nacks, f"seed={seed}"
        last = resources(99, also="other")
        stream.publish(last)
        client.wire.extend(taken(stream))
        while client.wire:
            tell(client.read(may_refuse=False))
            client.wire.extend(taken(stream))
        expected = {kind: last.named(kind, names) for kind, names in client.names.items()}
        assert client.has == expected, f"seed={seed}"


def test_versions_are_equal_in_all_servers() -> None:
    """A client that moves to another server gets the same versions."""
    versions = []
    for _ in range(2):
        stream = AdsStream()
        stream.publish(resources(7))
        stream.on_request(Request(ENDPOINTS, NAME))
        versions.append([each.version for each in taken(stream)])
    assert versions[0] == versions[1]
