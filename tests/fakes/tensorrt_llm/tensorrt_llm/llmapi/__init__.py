"""llmapi/__init__.py@036a60f7: what the engine imports of it."""

from ..disaggregated_params import DisaggregatedParams
from ..executor.errors import RequestError
from ..sampling_params import GuidedDecodingParams
from .retention import KvCacheRetentionConfig

__all__ = ["DisaggregatedParams", "GuidedDecodingParams", "KvCacheRetentionConfig", "RequestError"]
