"""Write tools/manifests/schemas: JSON schemas of the kinds that no Kubernetes knows by itself. Needs `npm`.

`python -m tools.manifests.vendored FOLDER` unpacks the packages @kubernetes-models/* into FOLDER and reads their TypeScript
declarations. Each package is generated from the custom resource definitions of its project. The schemas are closed:
an unknown field is a fault.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent / "schemas"
SCOPE: Final = "@kubernetes-models"
WANTED: Final = {
    "gateway-api@2.0.0": (
        "gateway.networking.k8s.io/v1/GRPCRoute",
        "gateway.networking.k8s.io/v1/BackendTLSPolicy",
    ),
    "prometheus-operator@6.0.0": ("monitoring.coreos.com/v1/ServiceMonitor",),
    "cert-manager@4.4.4": ("cert-manager.io/v1/Certificate", "cert-manager.io/v1/Issuer"),
}
"""Package and version -> kinds to take."""

_COMMENT: Final = re.compile(r"/\*.*?\*/", re.DOTALL)
_IMPORT: Final = re.compile(r'import \{ ([^}]*) \} from "([^"]+)"')
_DECLARED: Final = re.compile(r"export (?:interface|type) (I\w+)(?: extends ([\w, ]+?))?(?: =)? (?=[{\w\"])")
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\w+|[{}\[\]<>|?:;,()]')
_SIMPLE: Final = {"string": "string", "number": "number", "boolean": "boolean", "null": "null"}
_ANY: Final[dict[str, Any]] = {}
_FOREIGN: Final[dict[str, dict[str, Any]]] = {
    "IIoK8sApimachineryPkgApisMetaV1LabelSelector": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "matchExpressions": {
                "type": "array",
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "key": {"type": "string"},
                        "operator": {"type": "string"},
                        "values": {"type": "array", "items": {"type": "string"}},
                    },
                    "required": ["key", "operator"],
                },
            },
            "matchLabels": {"type": "object", "additionalProperties": {"type": "string"}},
        },
    }
}
"""Types of Kubernetes that the checks of `references` read."""


@dataclass
class _Tokens:
    """Tokens of a declaration, read from the front."""

    words: list[str]
    at: int = 0

    @property
    def head(self) -> str:
        return self.words[self.at]

    def take(self, wanted: str = "") -> str:
        word = self.head
        if wanted and word != wanted:
            raise ValueError(
                f"{word!r} where {wanted!r} is expected, behind {self.words[max(0, self.at - 8) : self.at]}"
            )
        self.at += 1
        return word

    def skip(self, wanted: str) -> bool:
        if self.head == wanted:
            self.at += 1
            return True
        return False


class Declarations:
    """Types of one package, read as they are needed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def schema(self, kind: str) -> dict[str, Any]:
        """Return the schema of `kind`, a path in the package such as "cert-manager.io/v1/Issuer"."""
        return self._file((self._root / f"{kind}.d.ts").resolve())

    def _file(self, path: Path) -> dict[str, Any]:
        text = _COMMENT.sub("", path.read_text("utf-8"))
        imports: dict[str, str] = {}
        for names, source in _IMPORT.findall(text):
            for name in names.split(","):
                imports[name.split(" as ")[-1].strip()] = source
        found = _DECLARED.search(text)
        assert found is not None, path
        tokens = _Tokens(_TOKEN.findall(text[found.end() :]))
        schema = self._type(tokens, path, imports)
        for parent in (found[2] or "").split(","):
            if parent.strip() and parent.strip() != "TypeMeta":
                schema = _joined(self._named(parent.strip(), path, imports), schema)
        return schema

    def _named(self, name: str, path: Path, imports: dict[str, str]) -> dict[str, Any]:
        """Return the schema of an imported type. Those of other packages are in _FOREIGN, or any value."""
        source = imports.get(name, "")
        if "IntOrString" in source:
            return {"type": ["string", "number"]}
        if not source.startswith("."):
            return deepcopy(_FOREIGN.get(name, _ANY))
        return self._file((path.parent / source).with_suffix(".d.ts").resolve())

    def _type(self, tokens: _Tokens, path: Path, imports: dict[str, str]) -> dict[str, Any]:
        tokens.skip("|")
        options = [self._one(tokens, path, imports)]
        while tokens.skip("|"):
            options.append(self._one(tokens, path, imports))
        if len(options) == 1:
            return options[0]
        if all("const" in each for each in options):
            return {"enum": [each["const"] for each in options]}
        return {"anyOf": options}

    def _one(self, tokens: _Tokens, path: Path, imports: dict[str, str]) -> dict[str, Any]:
        word = tokens.take()
        if word.startswith('"'):
            return {"const": json.loads(word)}
        if word in _SIMPLE:
            return {"type": _SIMPLE[word]}
        if word == "Array":
            tokens.take("<")
            items = self._type(tokens, path, imports)
            tokens.take(">")
            return {"type": "array", "items": items}
        if word == "{":
            return self._object(tokens, path, imports)
        if word == "(":
            inner = self._type(tokens, path, imports)
            tokens.take(")")
            return inner
        if word in ("unknown", "any", "object"):
            return dict(_ANY)
        return self._named(word, path, imports)

    def _object(self, tokens: _Tokens, path: Path, imports: dict[str, str]) -> dict[str, Any]:
        properties: dict[str, Any] = {}
        required: list[str] = []
        more: dict[str, Any] | bool = False
        while not tokens.skip("}"):
            if tokens.skip("["):
                while not tokens.skip("]"):
                    tokens.take()
                tokens.take(":")
                more = self._type(tokens, path, imports)
            else:
                name = tokens.take().strip('"')
                if not tokens.skip("?"):
                    required.append(name)
                tokens.take(":")
                properties[name] = self._type(tokens, path, imports)
            tokens.skip(";")
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": more}
        return schema | ({"required": required} if required else {})


def _joined(parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
    joined = dict(child)
    joined["properties"] = {**parent.get("properties", {}), **child.get("properties", {})}
    required = [*parent.get("required", ()), *child.get("required", ())]
    return joined | ({"required": required} if required else {})


def _unpacked(folder: Path) -> Iterator[tuple[str, Path]]:
    """Fetch and unpack each package into a folder of its own."""
    for package in WANTED:
        packed = subprocess.run(
            ["npm", "pack", "--silent", f"{SCOPE}/{package}"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
        target = folder / package
        with tarfile.open(folder / packed.stdout.strip()) as archive:
            archive.extractall(target, filter="data")
        yield package, target / "package"


def main() -> None:
    """Fetch the packages and write a schema for each kind, and the licence of the packages."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.manifests.vendored FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for package, root in _unpacked(folder):
        (FOLDER / "LICENSE.kubernetes-models").write_text((root / "LICENSE").read_text("utf-8"), "utf-8")
        for kind in WANTED[package]:
            schema = {"$comment": f"{SCOPE}/{package} {kind}", **Declarations(root).schema(kind)}
            (FOLDER / f"{Path(kind).name}.json").write_text(json.dumps(schema, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
