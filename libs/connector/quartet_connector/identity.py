"""What vLLM engine this is, as a ``PageLayout``: read from its configuration, and from the files of its weights."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import vllm
from msgspec import json
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from quartet_connector.layout import PageLayout

_SAMPLE_BYTES = 1 << 16
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


class NoPages(Exception):
    """This engine can have no pages; the text says why."""


def layout_of(config: Any, kv_cache: Any) -> PageLayout:
    """The layout of an engine's pages. Raises ``NoPages`` for one whose KV is not one block of full attention."""
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    if parallel.world_size != 1:
        raise NoPages(f"{parallel.world_size} ranks; pages are of engines with one")
    if not cache.enable_prefix_caching:
        raise NoPages("it has no prefix cache")
    if len(kv_cache.kv_cache_groups) != 1:
        raise NoPages(f"{len(kv_cache.kv_cache_groups)} groups of layers with KV; pages are of one, of full attention")
    [group] = kv_cache.kv_cache_groups
    specs = _specs(group)
    odd = sorted({type(spec).__name__ for spec in specs.values() if not isinstance(spec, FullAttentionSpec)})
    if odd:
        raise NoPages(f"layers of {', '.join(odd)}; pages are of full attention")
    block_tokens = int(group.kv_cache_spec.block_size)
    if kv_cache.hash_block_size not in (None, block_tokens):
        raise NoPages(f"blocks of {block_tokens} tokens, hashed by {kv_cache.hash_block_size}")
    layers = tuple(f"{name} {spec.page_size_bytes} {spec.dtype}" for name, spec in specs.items())
    return PageLayout(
        block_tokens=block_tokens,
        kv_bytes=sum(int(spec.page_size_bytes) for spec in specs.values()),
        dtype=str(cache.cache_dtype),
        layers=(f"{len(layers)} of {_digest(*layers)}", str(kv_cache.kv_cache_layout)),
        ranks=1,
        engine=f"vllm {vllm.__version__} {_device(config)}",
        model=_digest(str(json.encode(model.hf_config.to_dict(), enc_hook=str), "utf-8"), str(model.quantization)),
        weights=_weights(str(model.model), str(model.revision or ""), str(config.load_config.load_format)),
    )


def pages_of(kv_cache: Any) -> dict[str, int]:
    """Each layer's bytes of one block, in order."""
    [group] = kv_cache.kv_cache_groups
    return {name: int(spec.page_size_bytes) for name, spec in _specs(group).items()}


def _specs(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def _device(config: Any) -> str:
    kind = str(config.device_config.device_type)
    # CPUs of unlike capability lay keys out unlike, each as its kernels read them
    return f"{kind} {torch.backends.cpu.get_cpu_capability()}" if kind == "cpu" else kind


def _weights(model: str, revision: str, load_format: str) -> str:
    """What identifies weights: of local files names, sizes, and what is at their beginning and end."""
    directory = Path(model)
    if not directory.is_dir():
        return _digest(model, revision, load_format)
    said = [load_format]
    for pattern in _WEIGHTS:
        for path in sorted(directory.glob(pattern)):
            size = path.stat().st_size
            with path.open("rb") as file:
                begin = file.read(_SAMPLE_BYTES)
                file.seek(max(0, size - _SAMPLE_BYTES))
                said.append(f"{path.name} {size} {_digest(begin.hex(), file.read(_SAMPLE_BYTES).hex())}")
    return _digest(*said)


def _digest(*said: str) -> str:
    return hashlib.blake2b("\0".join(said).encode(), digest_size=8).hexdigest()
