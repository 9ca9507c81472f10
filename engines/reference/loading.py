"""Which arithmetic a configuration means, and the digest that tells its KV from any other's."""

from pathlib import Path

import xxhash

from engines.reference.arithmetic import Arithmetic
from engines.reference.config import EngineConfig
from engines.reference.hashed import HashedArithmetic


def load_arithmetic(config: EngineConfig) -> tuple[Arithmetic, str]:
    """Build the arithmetic and its digest. Reads the model directory for the transformer; OSError if there is
    none.
    """
    if config.arithmetic == "hashed":
        hashed = HashedArithmetic(
            vocab_size=config.vocab_size,
            max_sequence_tokens=config.max_sequence_tokens,
            salt=config.salt,
            end_token=config.end_token,
            end_probability=config.end_probability,
        )
        return (
            hashed,
            f"hashed-{config.vocab_size}-{config.end_token}-{xxhash.xxh3_64_hexdigest(config.salt.encode())}",
        )
    from engines.reference.transformer import Transformer  # the hashed engine needs no weights and no BLAS

    model_dir = Path(config.model_dir)
    return Transformer.load(model_dir), f"transformer-{directory_digest(model_dir)}"


def directory_digest(directory: Path) -> str:
    """xxh3_64 over the names and bytes of the files directly in `directory`, 16 hex digits."""
    digest = xxhash.xxh3_64()
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
