"""One ADS stream, state of the world: subscriptions, answers, acknowledgements and refusals. Pure.

For each type, the client names resources, and the server answers with a version and a nonce. The client's next request has
that nonce, and either the version (ACK) or the error (NACK). A request with an older nonce is ignored. The client sent it
before the latest answer arrived, and it repeats its names with the nonce of that answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from controlplane.xds.resource_set import TYPES, ResourceSet, version_of

WILDCARD: Final = "*"
"""Names all resources of a type, as the absence of names does in the first request."""

NAMES_MAX: Final = 64
"""Resources that a client may name per type. A mesh has one of each."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a client."""

    type_url: str
    names: frozenset[str] = frozenset()
    nonce: str = ""
    """Nonce of the answer that it acknowledges or refuses. Empty: the first request of its type."""
    error: str | None = None
    """Text of a refusal (NACK). None: not a refusal."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the server. It counts as sent."""

    type_url: str
    version: str
    nonce: str
    resources: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Nack:
    """A refusal of the latest answer of a type."""

    type_url: str
    version: str
    error: str


@dataclass(slots=True)
class _Subscription:
    """State of one type on the stream."""

    names: frozenset[str] | None
    """None: all of the type."""
    version: str = ""
    nonce: str = ""
    """Version and nonce of the latest answer. Empty: none was sent."""
    is_due: bool = True
    """True if an answer is needed even though the version is the same: new names."""
    acknowledged: str = ""
    """Version of the latest answer that the client has applied."""


@dataclass(slots=True)
class AdsStream:
    """See the module. The shell calls `take` until it returns None, after each `on_request` and each `publish`."""

    _resources: ResourceSet | None = None
    _types: dict[str, _Subscription] = field(default_factory=dict)
    _sent: int = 0

    def on_request(self, request: Request) -> Nack | None:
        """Take a request. Return the refusal in it, if there is one. Types that the server lacks are ignored."""
        if request.type_url not in TYPES:
            return None
        known = self._types.get(request.type_url)
        if known is None or not known.nonce:
            names = None if not request.names or WILDCARD in request.names else request.names
            self._types[request.type_url] = _Subscription(names)
            return None
        if request.nonce != known.nonce:
            return None
        nack = None
        if request.error is None:
            known.acknowledged = known.version
        else:
            nack = Nack(request.type_url, known.version, request.error)
        self._subscribe(known, request.names)
        return nack

    def publish(self, resources: ResourceSet) -> None:
        """Take the resources in force."""
        self._resources = resources

    def take(self) -> Answer | None:
        """Return the next answer to send, in make-before-break order. None: nothing has changed."""
        if self._resources is None:
            return None
        for type_url in TYPES:
            subscription = self._types.get(type_url)
            if subscription is None:
                continue
            found = self._resources.named(type_url, subscription.names)
            version = version_of(found)
            if subscription.is_due or version != subscription.version:
                self._sent += 1
                subscription.version, subscription.nonce, subscription.is_due = (
                    version,
                    str(self._sent),
                    False,
                )
                return Answer(type_url, version, subscription.nonce, found)
        return None

    def acknowledged(self, type_url: str) -> str:
        """Return the version of a type that the client has applied last. Empty: none."""
        known = self._types.get(type_url)
        return known.acknowledged if known is not None else ""

    def _subscribe(self, known: _Subscription, names: frozenset[str]) -> None:
        """Take the names of a later request. New names need an answer, also if the server lacks them.

        Answers with clusters or listeners are complete sets. So the client learns at once that a resource does not exist.
        """
        if known.names is None and not names:
            return
        wanted = None if WILDCARD in names else names
        is_more = known.names is not None and (wanted is None or not wanted <= known.names)
        known.is_due = known.is_due or is_more
        known.names = wanted
