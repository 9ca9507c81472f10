"""Block hashes: equal exactly where prefixes are equal."""

from hypothesis import given
from hypothesis import strategies as st

from kvmesh import blocks
from kvmesh.attach.frames import pack_ids

tokens = st.lists(st.integers(0, 3), max_size=40)


@given(tokens, tokens, st.integers(1, 8))
def test_hashes_agree_exactly_on_the_common_prefix(one: list[int], two: list[int], size: int) -> None:
    """Two prompts share a block's hash exactly if they share all tokens up to its end."""
    first, second = (blocks.chain(pack_ids(ids), size, "salt") for ids in (one, two))
    assert len(first) == len(one) // size
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        end = (index + 1) * size
        assert (a == b) == (one[:end] == two[:end])


@given(tokens, st.integers(1, 8))
def test_a_salt_separates_versions(ids: list[int], size: int) -> None:
    """A block of one version is never found under another version's salt."""
    data = pack_ids(ids)
    assert not set(blocks.chain(data, size, "a")) & set(blocks.chain(data, size, "b"))


@given(tokens, st.integers(1, 8))
def test_a_chain_can_be_grown_block_by_block(ids: list[int], size: int) -> None:
    """Hashing a block after its parent gives the same as hashing the whole chain."""
    data, parent, grown = pack_ids(ids), blocks.root_hash("s"), []
    for at in range(len(ids) // size):
        parent = blocks.child_hash(parent, data[4 * size * at : 4 * size * (at + 1)])
        grown.append(parent)
    assert grown == blocks.chain(data, size, "s")
    assert blocks.unpack(blocks.pack(grown)) == tuple(grown)
