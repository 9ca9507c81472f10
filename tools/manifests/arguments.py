"""Arguments and configurations of containers, parsed by the programs that will read them."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from engines.reference import serve
from engines.reference.loading import facts_of
from engines.tensorrt_llm import llm_file, settings
from kvmesh import redis_url, service_options
from kvmesh.config import ConfigError, MeshConfig
from kvmesh.replica import options as replica_options
from kvmesh.roles import EDGE, ROLES, SERVERS, option_of
from kvmesh.service_options import ServiceOptions
from kvmesh.trust.names import name_of
from tools.manifests.documents import Body, Manifest, Pod, named, pods
from tools.manifests.mounted import key_of, text_at, volume_at
from tools.manifests.role_rules import image_of, role_of, words_of
from tools.manifests.sources import keys_of
from tools.manifests.ways import REPLICAS

POD_ADDRESS: Final = "10.244.0.10"
LLM: Final = llm_file.NAME


def faults(manifests: Sequence[Manifest], present: Collection[str] = ()) -> Iterator[str]:
    """Yield a sentence for each program that would refuse its arguments, its configuration or its certificates.

    `present`: objects that the cluster has already, such as "Secret/mesh-router".
    """
    with tempfile.TemporaryDirectory() as folder:
        for pod in pods(manifests):
            for container in pod.running:
                yield from _of_container(manifests, pod, container, Path(folder), present)


def _of_container(
    manifests: Sequence[Manifest], pod: Pod, container: Body, folder: Path, present: Collection[str]
) -> Iterator[str]:
    role, title = role_of(container), pod.workload.title
    if role == "engine" and image_of(container) == "kvmesh-engine" and not container.get("command"):
        yield from _prefixed(title, _refusal(lambda: _engine(container)))
    if role not in SERVERS:
        return
    environment = {
        each["name"]: _value(manifests, each)
        for each in container.get("env") or ()
        if "value" in each or "valueFrom" in each
    }
    words = [_expanded(word, environment) for word in words_of(container)][1:]
    path = option_of(words, "config")
    text = text_at(manifests, pod, container, path)
    if path and text is None:
        yield f"--config = {path} of {title} is in no ConfigMap that its container mounts."
        return
    if text is not None:
        local = folder / "kvmesh.toml"
        local.write_text(text, "utf-8")
        words += ["--config", str(local)]  # the last one counts
    yield from _redis(manifests, title, option_of(words, "redis") or environment.get(redis_url.VARIABLE, ""))
    found: list[ServiceOptions] = []

    def parse() -> None:
        given = [*ports_of(role), "--advertise", f"{POD_ADDRESS}:{ROLES[role].port}", *words]
        if role in REPLICAS:
            found.append(replica_options.parse(role, given, environment))  # type: ignore[arg-type]  # one of REPLICAS
        else:
            found.append(service_options.parse(role, given, environment))

    yield from _prefixed(title, _refusal(parse).replace(str(folder / "kvmesh.toml"), path))
    for options in found:
        yield from _certificates(manifests, pod, container, role, options.config, present)
        if role in REPLICAS:
            yield from _versions(manifests, pod, options.pool_settings.version.name, folder)


def _redis(manifests: Sequence[Manifest], title: str, url: str) -> Iterator[str]:
    """A host without a dot is a Service of the namespace."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:  # the process refuses the URL itself
        return
    if host and "." not in host and ":" not in host and host not in named(manifests, "Service"):
        yield f'The URL of Redis of {title} names the Service "{host}", which is missing.'


def _versions(manifests: Sequence[Manifest], pod: Pod, wanted: str, folder: Path) -> Iterator[str]:
    """The engine beside a replica serves the version of its pool, `wanted`."""
    title = pod.workload.title
    for container in pod.containers:
        words = [str(each) for each in (*(container.get("command") or ()), *(container.get("args") or ()))]
        told = ""
        if image_of(container) == "kvmesh-engine":
            told = option_of(words, "model-version")
        elif path := option_of(" ".join(words).split(), "config") if LLM in " ".join(words) else "":
            text = text_at(manifests, pod, container, path)
            if text is None:
                yield f"--config = {path} of {title} is in no ConfigMap that its container mounts."
                continue
            (folder / LLM).write_text(text, "utf-8")
            try:
                told = str(settings.split(llm_file.read(folder / LLM))[1]["model_version"])
            except settings.SettingsRefused as error:
                yield f"{title} would not start: {str(error).replace(str(folder / LLM), path)}"
        if told and told != wanted:
            yield f'The engine of {title} serves the version "{told}": allowed is "{wanted}", that of its pool.'


def ports_of(role: str) -> list[str]:
    """Return the options that the entrypoint of the image puts before the others."""
    ports = ROLES[role].ports
    further = [
        word for kind in ("http", "metrics") if kind in ports for word in (f"--{kind}-port", str(ports[kind]))
    ]
    return ["--listen", f"0.0.0.0:{ports['grpc']}", *further]


def _prefixed(title: str, refusal: str) -> Iterator[str]:
    if refusal:
        yield f"{title} would not start: {' '.join(refusal.split())}"


def _refusal(parse: Callable[[], None]) -> str:
    """Return the sentence of a program that refuses its arguments, or an empty text."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            parse()
    except (ConfigError, ValueError, OSError) as error:
        return str(error)
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1].partition("error: ")[2] + "."
    return ""


def _engine(container: Body) -> None:
    ports = [word for kind, port in ROLES["engine"].ports.items() for word in (f"--{kind}-port", str(port))]
    words = [
        *ports,
        "--advertise",
        f"{POD_ADDRESS}:{ROLES['engine'].ports['kv']}",
        *map(str, (container.get("args") or ())[1:]),
    ]
    facts_of(serve.config_of(serve.parser().parse_args(words)))


def _expanded(word: str, environment: Mapping[str, str]) -> str:
    for name, value in environment.items():
        word = word.replace(f"$({name})", value)
    return word


def _value(manifests: Sequence[Manifest], variable: Body) -> str:
    """Return the value of a variable of the environment; an example of one that the cluster alone knows."""
    if "value" in variable:
        return str(variable["value"])
    ref = variable["valueFrom"].get("secretKeyRef")
    if ref is None:
        return "pod-0"
    secret = named(manifests, "Secret").get(ref["name"])
    value = (secret.body.get("stringData") or {}).get(ref["key"]) if secret else None
    return str(value) if value else "redis://redis.example:6379/0"


def _certificates(
    manifests: Sequence[Manifest],
    pod: Pod,
    container: Body,
    role: str,
    config: MeshConfig,
    present: Collection[str],
) -> Iterator[str]:
    """Files of certificates are in mounted Secrets, and a process with TLS has no gRPC probe: the kubelet has no TLS."""
    secrets, title = keys_of(manifests, present)["Secret"], pod.workload.title
    paths = {f"trust.{key}": str(getattr(config.trust, key)) for key in ("certificate", "key", "authority")}
    if role in EDGE:
        paths |= {
            f"frontend.{key}": str(getattr(config.frontend, key))
            for key in ("certificate", "key", "client_authority")
        }
    for key, given in paths.items():
        path = given.replace("{role}", role)
        if not path:
            continue
        volume, file = volume_at(pod, container, path)
        if "csi" in volume:
            continue
        source: Body = volume.get("secret") or {}
        name = str(source.get("secretName", ""))
        there = secrets.get(name, set())
        if not name:
            yield f'{key} = "{path}" of {title} is in no Secret that its container mounts.'
        elif there is not None and key_of(source, file) not in there:
            yield f'{key} = "{path}" of {title} is missing in the Secret "{name}".'
        issued = [
            each for each in named(manifests, "Certificate").values() if each.spec.get("secretName") == name
        ]
        wanted = name_of(role, config.mesh.name)
        if key == "trust.certificate" and issued and wanted not in (issued[0].spec.get("dnsNames") or ()):
            yield f"{issued[0].title} lacks the name {wanted}, which peers of {title} demand (mesh.name)."
    if not config.trust.certificate:
        for volume in pod.spec.get("volumes") or ():
            name = str((volume.get("secret") or {}).get("secretName", ""))
            if {"tls.crt", "tls.key"} <= (secrets.get(name) or set()):
                what = f'the certificate "{name}", but its kvmesh.toml has no [trust]'
                yield f"{title} mounts {what}: it would speak plain text."
    has_tls = bool(config.frontend.certificate if role in EDGE else config.trust.certificate)
    if has_tls and "grpc" in (container.get("readinessProbe") or {}):
        yield f"readinessProbe of {title} is gRPC, which the kubelet asks without TLS: allowed is /readyz over HTTP."
