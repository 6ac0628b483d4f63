"""How an engine's pages lie, and what else must be equal before one engine may read what another one computed."""

import hashlib
from typing import Final

import msgspec
from msgspec import Struct

from quartet_connector import page

PROTOCOL: Final = 1


class PageLayout(Struct, frozen=True):
    """Two engines exchange pages only if all of it is equal. ``weights`` is a digest of what identifies the weights.

    ``kv_bytes`` is the KV of one block, all layers and ranks together; ``layers`` describes them in order.
    """

    block_tokens: int
    kv_bytes: int
    dtype: str
    layers: tuple[str, ...]
    ranks: int
    engine: str
    model: str
    weights: str

    @property
    def fingerprint(self) -> int:
        """64 bits that stand for all of it."""
        said = msgspec.msgpack.encode((page.VERSION, *msgspec.structs.astuple(self)))
        return int.from_bytes(hashlib.blake2b(said, digest_size=8, person=b"layout").digest(), "little")

    @property
    def slot_bytes(self) -> int:
        """What one page takes in an arena."""
        return page.header_bytes(self.block_tokens) + self.kv_bytes

    def differs(self, other: "PageLayout") -> str:
        """The first thing in which ``other`` differs, in words; "" when nothing does."""
        for name, here, there in zip(
            self.__struct_fields__, msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True
        ):
            if here != there:
                return f"{name} {here} against {there}"
        return ""
