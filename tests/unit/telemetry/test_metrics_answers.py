"""The responses of the metrics port: every path and method, malformed requests, and heads in parts."""

from __future__ import annotations

import http.client
import io
import socket
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.metrics_answers import HEAD_BYTES_MAX, Sources, fault, path_of, response
from kvmesh.roles import ALIVE, ROLES
from kvmesh.roles import READY as READY_PROBE

READY = Sources(lambda: b"kvmesh_router_tokens_total 5.0\n", lambda: "")
DRAINS = Sources(READY.metrics, lambda: "the process drains")
OTHERS = b"the paths are /metrics, /healthz and /readyz\n"
NO_LINE = b"this is no request line of HTTP/1.0 or HTTP/1.1\n"
TOO_LONG = b"the head of the request has 16384 bytes or more\n"
BEHIND = b" HTTP/1.1\r\nHost: a\r\n\r\n"

TOKENS = st.text("!#$%&'*+.^_`|~09AZaz-", min_size=1)
VISIBLE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1)


class _Socket:
    """The end of a connection at which `received` has arrived."""

    def __init__(self, received: bytes) -> None:
        self._received = received

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._received)


def parsed(answer: bytes | None, method: str = "GET") -> tuple[http.client.HTTPResponse, bytes]:
    """Return the response as Python's client reads it, and its body. The connection ends behind it."""
    assert answer is not None
    read = http.client.HTTPResponse(cast("socket.socket", _Socket(answer)), method=method)
    read.begin()
    body = read.read()
    assert read.will_close and read.getheader("Cache-Control") == "no-store"
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert rest == body and head.isascii()
    return read, body


@pytest.mark.parametrize(
    ("line", "status", "body"),
    [
        (b"GET /metrics", 200, READY.metrics()),
        (b"GET /metrics?name[]=a&x=/y", 200, READY.metrics()),
        (b"GET http://host:9100/metrics?x", 200, READY.metrics()),
        (b"GET HTTPS://[::1]/metrics", 200, READY.metrics()),
        (b"GET /healthz", 200, b"ok\n"),
        (b"GET /healthz?verbose", 200, b"ok\n"),
        (b"GET /readyz", 503, b"the process drains\n"),
        (b"GET /", 404, OTHERS),
        (b"GET http://host", 404, OTHERS),
        (b"GET /nonsense", 404, OTHERS),
        (b"GET /metrics/", 404, OTHERS),
        (b"GET /%6detrics", 404, OTHERS),
        (b"GET //host/metrics", 404, OTHERS),
        (b"GET /http://host/metrics", 404, OTHERS),
        (b"GET *", 404, OTHERS),
        (b"get /metrics", 405, b"the method must be GET or HEAD\n"),
        (b"POST /metrics", 405, b"the method must be GET or HEAD\n"),
        (b"OPTIONS *", 405, b"the method must be GET or HEAD\n"),
        (b"DELETE /nonsense", 405, b"the method must be GET or HEAD\n"),
    ],
)
def test_every_path_and_method(line: bytes, status: int, body: bytes) -> None:
    """A path has its page, whatever its query and its form; others name the pages."""
    for behind in (BEHIND, b" HTTP/1.0\r\n\r\n", b" HTTP/1.0\n\n", BEHIND + b"a body"):
        answer, found = parsed(response(line + behind, DRAINS))
        assert (answer.status, found) == (status, body)
        assert answer.getheader("Allow") == ("GET, HEAD" if status == 405 else None)


def test_the_probes_of_every_role_have_pages() -> None:
    """Orchestrators send the probes of the roles table; a 404 would restart each process, or keep it out of service."""
    probes = {ALIVE, READY_PROBE, *(role.ready for role in ROLES.values())}
    paths = {probe.path for probe in probes if probe is not None and probe.path}
    assert paths == {"/healthz", "/readyz"}
    for path in paths:
        assert parsed(response(f"GET {path}".encode() + BEHIND, READY))[0].status == 200


def test_readiness_is_read_at_each_request() -> None:
    """It is 200 as soon as there is no reason; liveness and metrics do not depend on it."""
    reason = "the process starts"
    sources = Sources(READY.metrics, lambda: reason)
    assert parsed(response(b"GET /readyz" + BEHIND, sources))[0].status == 503
    reason = ""
    answer, body = parsed(response(b"GET /readyz" + BEHIND, sources))
    assert (answer.status, body) == (200, b"ready\n")


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/nonsense"])
def test_head_gives_the_head_of_get(path: str) -> None:
    """Its length is that of the page."""
    for sources in (READY, DRAINS):
        get = response(f"GET {path}".encode() + BEHIND, sources)
        head = response(f"HEAD {path}".encode() + BEHIND, sources)
        assert get is not None and head == get[: get.index(b"\r\n\r\n") + 4]
        assert parsed(head, "HEAD")[0].getheader("Content-Length") == str(len(get) - len(head))


@pytest.mark.parametrize(
    "received",
    [
        b"\n",
        b"\r\n\r\n",
        b"GET\r\n",
        b"GET /metrics\r\n",
        b"GET /metrics HTTP/1.1 \r\n",
        b"GET  /metrics HTTP/1.1\r\n",
        b"GET /met rics HTTP/1.1\r\n",
        b"GET /\xff HTTP/1.1\r\n",
        b"GET /metrics HTTP/2.0\r\n",
        b"GET /metrics http/1.1\r\n",
        b"G(T /metrics HTTP/1.1\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",
    ],
)
def test_a_line_that_is_no_request_line_is_refused_at_its_end(received: bytes) -> None:
    """HTTP/2, TLS and junk get 400 without a wait for more."""
    answer, body = parsed(response(received, READY))
    assert (answer.status, body) == (400, NO_LINE)
    assert response(received.partition(b"\n")[0], READY) is None


@pytest.mark.parametrize(("begin", "rest"), [(b"", b"x"), (b"GET /metrics HTTP/1.1\r\n", b"A: b\r\n")])
def test_an_endless_head_is_refused_at_its_bound(begin: bytes, rest: bytes) -> None:
    """A head within the bound is answered."""
    endless = (begin + rest * HEAD_BYTES_MAX)[:HEAD_BYTES_MAX]
    assert response(endless[:-1], READY) is None
    for more in (b"", b"\r\n\r\n"):
        answer, body = parsed(response(endless + more, READY))
        assert (answer.status, body) == (431, TOO_LONG)
    line = b"GET /healthz HTTP/1.1\r\nA: "
    longest = line + b"b" * (HEAD_BYTES_MAX - len(line) - 4) + b"\r\n\r\n"
    assert parsed(response(longest, READY))[0].status == 200


@given(
    st.binary(), st.sampled_from([b"", b"GET ", b"GET /metrics HTTP/1.1\r\n", b"HEAD /readyz HTTP/1.0\r\n"])
)
def test_any_bytes_have_a_response_or_wait(received: bytes, before: bytes) -> None:
    """The response is well-formed, and bytes behind the request change nothing."""
    answer = response(before + received, DRAINS)
    if answer is None:
        assert b"\n\n" not in before + received and b"\n\r\n" not in before + received
        return
    method = "HEAD" if before.startswith(b"HEAD") and answer.startswith(b"HTTP/1.1 503") else "GET"
    assert parsed(answer, method)[0].status in (200, 400, 404, 405, 503)
    assert response(before + received + b"\r\nGET / HTTP/1.1\r\n\r\n", DRAINS) == answer


@given(st.one_of(TOKENS, st.sampled_from(["GET", "HEAD"])), VISIBLE, st.booleans())
def test_any_method_and_target(method: str, target: str, is_known: bool) -> None:
    """Only the methods GET and HEAD, and only the three paths, are not refused."""
    target = f"/healthz?{target}" if is_known else target
    answer, body = parsed(response(f"{method} {target}".encode() + BEHIND, READY), method)
    if method not in ("GET", "HEAD"):
        assert answer.status == 405
    elif is_known:
        assert answer.status == 200
    else:
        assert answer.status == (200 if path_of(target) in ("/metrics", "/healthz", "/readyz") else 404)
        assert not body or body in (OTHERS, READY.metrics(), b"ok\n", b"ready\n")


@given(st.text(min_size=1))
def test_any_reason_is_one_line(reason: str) -> None:
    """An operator's text cannot forge headers, lines or a success."""
    answer, body = parsed(response(b"GET /readyz" + BEHIND, Sources(READY.metrics, lambda: reason)))
    assert answer.status == 503
    assert body.endswith(b"\n") and 1 < len(body) <= 401
    assert all(0x20 <= each <= 0x7E for each in body[:-1])


def test_a_bug_is_500() -> None:
    """The text names the log and no more."""
    answer, body = parsed(fault())
    assert (answer.status, body) == (500, b"a bug: the log of the process has it\n")
