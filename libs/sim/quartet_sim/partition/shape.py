"""What a model consists of, as far as cutting it matters: layers that are alike, an embedding, an output head."""

from msgspec import Struct

from quartet_core.catalogue import ModelSpec

EMBEDDING_BYTES_PER_WEIGHT = 2
"""Embedding and output head stay in BF16 in every quantized checkpoint that the catalogue's sizes describe."""


class UnknownShape(LookupError):
    """The catalogue does not say what a layer of ``model`` holds: ``missing`` are the keys to give."""

    def __init__(self, model: str, missing: tuple[str, ...]) -> None:
        super().__init__(f"[models.{model}] lacks {', '.join(missing)}, without which it cannot be cut into stages")
        self.model = model
        self.missing = missing


class Shape(Struct, frozen=True, kw_only=True):
    """A decoder of ``layers`` equal layers. ``kv_layer_bytes`` is the BF16 KV of one token in one layer."""

    model: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    kv_layer_bytes: int

    @property
    def layer_weights(self) -> int:
        """Weights of one layer: attention with grouped keys and values, a gated MLP, two norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def table_bytes(self) -> int:
        """Bytes of the embedding, and of the output head, each."""
        return self.vocab * self.hidden * EMBEDDING_BYTES_PER_WEIGHT

    def divides_by(self, tp: int) -> bool:
        """Whether ``tp`` GPUs can share its layers: engines split heads, and repeat KV heads when they run out."""
        fits_kv = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        return self.heads % tp == 0 and self.intermediate % tp == 0 and fits_kv


def shape_of(spec: ModelSpec) -> Shape:
    """The shape of ``spec``. Raises `UnknownShape`."""
    missing = tuple(name for name in ("hidden", "heads", "intermediate", "vocab") if not getattr(spec, name))
    if missing:
        raise UnknownShape(spec.name, missing)
    return Shape(
        model=spec.name,
        layers=spec.layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate=spec.intermediate,
        vocab=spec.vocab,
        kv_layer_bytes=spec.kv_bytes_per_token // spec.layers,
    )
