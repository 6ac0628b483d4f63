"""What one prompt's KV costs over each kind of path, from the catalogue and the link classes; ``docs/kv-costs.md``."""

from collections.abc import Iterator

from msgspec import structs

from quartet_core.catalogue import builtin
from quartet_core.links import choose, link_between, place_on, transfer_ms

TOKENS = (4_096, 32_768, 131_072)
MODELS = (("llama-3.1-8b", 1), ("llama-3.1-70b", 4))
"""Models and the cards that each runs on, in FP8 with KV in BF16."""

ENDS = (
    ("one host", "H100_SXM5", True),
    ("memory", "H100_SXM5", True),
    ("memory", "L40S_PCIE", True),
    ("RDMA", "H100_SXM5", True),
    ("RDMA", "L40S_PCIE", True),
    ("Ethernet", "L40S_PCIE", False),
)
"""Where the target is, seen from H100s that prefilled ("memory": from its own host's memory, where a store has it); its
cards; whether both hosts have RoCE at 400 Gb/s."""

ARTICLE_MS = (2.0, 50.0)
"""The article's "50 ms to 2 ms"."""

_HEAD = (
    ("model, cards", "---"), ("tokens", "---:"), ("KV", "---:"), ("path", "---"), ("moved", "---:"),
    ("computed by the target", "---:"), ("cheaper", "---"), ("even at", "---:"), ("in 2 to 50 ms", "---"),
)  # fmt: skip


def rows() -> Iterator[str]:
    """The table of ``docs/kv-costs.md``, as Markdown, a line at a time."""
    yield f"| {' | '.join(name for name, _ in _HEAD)} |"
    yield f"| {' | '.join(rule for _, rule in _HEAD)} |"
    for model, gpus in MODELS:
        for tokens in TOKENS:
            for where, into, rdma in ENDS:
                yield f"| {' | '.join(_row(model, gpus, tokens, where, into, rdma=rdma))} |"


def _row(model: str, gpus: int, tokens: int, where: str, into: str, *, rdma: bool) -> tuple[str, ...]:
    catalogue = builtin()
    kv_bytes = tokens * catalogue.model(model).kv_bytes_per_token
    nic_gb_per_s = 46.6 if rdma else 0.0
    source, target = (
        place_on(node, catalogue.hardware_class(hardware), gpus, "roce" if rdma else "", nic_gb_per_s)
        for node, hardware in (("a", "H100_SXM5"), ("a" if where in ("one host", "memory") else "b", into))
    )
    if where == "memory":
        source = structs.replace(source, host=True)
    link = link_between(source, target)
    choice = choose(transfer_ms(link, kv_bytes), catalogue.profile(into, model, "fp8", gpus), 0, tokens)
    even_gb_per_s = kv_bytes / 1e6 / max(choice.recompute_ms - link.setup_ms, 1e-9)
    least, most = ARTICLE_MS
    inside = "below" if choice.move_ms < least else "above" if choice.move_ms > most else "yes"
    card = into.partition("_")[0]
    return (
        f"{model}, {gpus}",
        f"{tokens:,}",
        f"{kv_bytes / 1e9:.2f} GB",
        f"{link.kind} into {gpus} x {card}, {link.gb_per_s:g} GB/s",
        f"{choice.move_ms:,.1f} ms",
        f"{choice.recompute_ms:,.0f} ms",
        "move" if choice.move else "compute",
        f"{even_gb_per_s:.2g} GB/s",
        inside,
    )
