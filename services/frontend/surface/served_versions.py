"""The model versions that this frontend can serve: tokenizer, table of token bytes, and bounds of each.

`load` reads the folders of all versions of the configuration, at start. Versions with equal tokenizer files share one
tokenizer object. Everything else here is pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Final

from kvmesh.config import MeshConfig
from kvmesh.models import folder as model_folder
from kvmesh.models.folder import ModelFolder, ModelFolderError
from kvmesh.models.template_check import TemplateCheck
from kvmesh.models.tokenizer import ModelTokenizer
from kvmesh.pools import first_pool, pool_names, pool_settings, version_names, version_settings
from kvmesh.snapshot.content import Content, Track
from kvmesh.tenants.caller import ServiceClass
from services.frontend.requests.models import Models
from services.frontend.surface.validation import Bounds

WARM_UP_TEXT: Final = "Warm up: 12 tokens, naïve café, 東京, 🚀.\n"
"""Text of one to four bytes a character, so that a tokenizer uses all its tables."""


class ServedVersion:
    """One model version. Versions with one `tokenizer` object make the same token ids of each prompt."""

    __slots__ = ("_bounds", "_bounds_up_to", "name", "tokenizer")

    def __init__(self, tokenizer: ModelTokenizer, bounds: Bounds) -> None:
        self.name = bounds.model_version
        self.tokenizer = tokenizer
        self._bounds = bounds
        self._bounds_up_to: dict[int, Bounds] = {}
        """Bounds by the largest output limit of a service class."""

    def bounds(self, service_class: ServiceClass) -> Bounds:
        """Return the bounds of requests of `service_class`."""
        known = self._bounds_up_to.get(service_class.max_output_tokens)
        if known is None:
            known = self._bounds.up_to(service_class.max_output_tokens)
            self._bounds_up_to[service_class.max_output_tokens] = known
        return known

    @property
    def widest(self) -> Bounds:
        """The bounds without the limits of a service class."""
        return self._bounds

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._bounds.model

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest context."""
        return self._bounds.max_sequence_tokens


class ServedVersions:
    """All versions by name. The first one is that of the first pool of the configuration."""

    def __init__(self, versions: list[ServedVersion]) -> None:
        assert versions, "a frontend serves at least one version"
        self._by_name: Mapping[str, ServedVersion] = {version.name: version for version in versions}
        self.first = versions[0]
        self.max_sequence_tokens = max(version.max_sequence_tokens for version in versions)
        self.models = frozenset(version.model for version in versions)
        """Names of all models."""
        self.has_one_tokenizer = len({id(version.tokenizer) for version in versions}) == 1

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __getitem__(self, name: str) -> ServedVersion:
        return self._by_name[name]

    def get(self, name: str) -> ServedVersion:
        """Return the version `name`, or the first one if this frontend cannot serve `name`."""
        return self._by_name.get(name, self.first)

    def run_tokenizers(self) -> dict[str, list[int]]:
        """Run each tokenizer once, and return the token ids of WARM_UP_TEXT by version. The first run of a library is slow.

        Takes CPU time, and may be called on any thread.
        """
        return {name: version.tokenizer.run_once(WARM_UP_TEXT) for name, version in self._by_name.items()}

    def share_tokenizer(self, one: str, other: str) -> bool:
        """True if both versions are served, are of one model, and make the same token ids of each prompt."""
        first, second = self._by_name.get(one), self._by_name.get(other)
        if first is None or second is None or first.model != second.model:
            return False
        return first.tokenizer is second.tokenizer

    def refusal(self, content: Content) -> str:
        """Return why this frontend cannot serve `content`, or an empty text. A pool without a track gets no request."""
        missing = [
            f'pools["{track.pool}"].model_version is "{track.model_version}"'
            for track in content.pools
            if track.model_version not in self and (track.track is not Track.IDLE or track.weight_percent)
        ]
        if not missing:
            return ""
        return f"{', '.join(missing)}; this frontend serves {', '.join(sorted(self))}"


def load(config: MeshConfig) -> ServedVersions:
    """Return all versions of `config`. Raises ModelFolderError and ConfigError.

    Each chat template is rendered once by a child process, which a hostile one ends alone.
    """
    paths = {name: version_settings(config, name).model_path for name in version_names(config)}
    folders = {path: model_folder.read(path) for path in dict.fromkeys(paths.values())}
    shared: dict[object, ModelTokenizer] = {}
    text_max = config.frontend.message_bytes_max
    with ExitStack() as children:
        checks = [
            (folder, children.enter_context(check))
            for folder in folders.values()
            for check in _checks(config, folder)
        ]
        for folder, check in checks:
            if reason := check.result():
                raise ModelFolderError(f"{folder.path}: the chat template is refused: {reason}.")
    for folder in folders.values():  # compiles templates, so it comes after their checks
        if folder.shaping not in shared:
            shared[folder.shaping] = ModelTokenizer(folder, text_max=text_max)
    return of(config, {name: (shared[folders[path].shaping], folders[path]) for name, path in paths.items()})


def models_of(config: MeshConfig) -> Models:
    """Return the models of the configuration. The default one is that of the first pool."""
    pools = [(name, pool_settings(config, name).version) for name in pool_names(config)]
    return Models(
        first_pool(config).version.model,
        {version.name: version.model for _, version in pools},
        [(name, version.name) for name, version in pools],
    )


def of(config: MeshConfig, versions: Mapping[str, tuple[ModelTokenizer, ModelFolder]]) -> ServedVersions:
    """Return the versions with their tokenizers and folders, as of `load`. The first one comes first."""
    return ServedVersions(
        [
            ServedVersion(tokenizer, bounds_of(config, name, tokenizer, folder))
            for name, (tokenizer, folder) in versions.items()
        ]
    )


def bounds_of(
    config: MeshConfig, model_version: str, tokenizer: ModelTokenizer, folder: ModelFolder
) -> Bounds:
    """Return the bounds of requests of `model_version`."""
    return Bounds(
        model=version_settings(config, model_version).model,
        model_version=model_version,
        vocab_size=tokenizer.vocab_size,
        token_bytes_max=tokenizer.token_bytes_max,
        max_sequence_tokens=context_tokens(config, folder),
        max_output_tokens_default=config.frontend.max_output_tokens_default,
        max_output_tokens_max=config.frontend.max_output_tokens_max,
        defaults=folder.defaults,
    )


def context_tokens(config: MeshConfig, folder: ModelFolder) -> int:
    """Return the tokens of the longest context: of the engines, and of the model unless they do not compute it."""
    longest = config.engine.max_sequence_tokens
    if config.engine.arithmetic == "hashed":
        return longest
    return min(longest, folder.context_tokens or longest)


def _checks(config: MeshConfig, folder: ModelFolder) -> Iterator[TemplateCheck]:
    """Begin the check of each template of `folder`, one after the other."""
    context = context_tokens(config, folder)
    for source in dict.fromkeys((folder.template, folder.tool_template)):
        if source:
            yield TemplateCheck.begin(source, folder.named_tokens, context, config.frontend.message_bytes_max)
