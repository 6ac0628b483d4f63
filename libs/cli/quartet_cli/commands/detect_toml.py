"""A host's hardware as the ``[agent]`` section of a quartet.toml: what ``quartet detect --toml`` prints."""

import json
from collections.abc import Iterator, Mapping
from itertools import groupby

from quartet_host.host import Gpu, Host
from quartet_host.nics import Nic


def written(host: Host, node: str) -> str:
    """The section. It loads as it is; engines are proposed in comments, since which model they serve is not known."""
    parts = [f"# Hardware of {node}, as quartet detect found it."]
    parts += [f"# {remark}" for remark in host.remarks]
    parts += ["[agent]", f"node = {_text(node)}", f"fabrics = [{', '.join(_text(kind) for kind in fabrics(host))}]", ""]
    for gpu in host.gpus:
        parts += _gpu(gpu)
    for nic in host.nics:
        parts += _nic(nic)
    for hardware, first, count in _runs(host.gpus):
        parts += _engines(hardware, first, count)
    return "\n".join(parts)


def fabrics(host: Host) -> list[str]:
    """Link classes of the NICs whose link is up, RDMA first; TCP always works."""
    kinds = {nic.link_class for nic in host.nics if nic.up}
    return [*sorted(kinds - {"TCP"}), "TCP"]


def _gpu(gpu: Gpu) -> list[str]:
    pairs: dict[str, str | float | None] = {
        "index": gpu.index,
        "hardware": gpu.hardware or None,
        "pci": gpu.device.address,
        "uuid": gpu.uuid or None,
        "root": gpu.device.root or None,
        "numa": gpu.device.numa,
        "pcie_gen": gpu.link.max_gen,
        "pcie_width": gpu.link.max_width,
    }
    return ["[[agent.gpus]]", *_pairs(pairs), ""]


def _nic(nic: Nic) -> list[str]:
    pairs: dict[str, str | float | None] = {
        "name": nic.name,
        "pci": nic.device.address,
        "root": nic.device.root or None,
        "numa": nic.device.numa,
        "gbit_per_s": nic.gbit_per_s,
        "rdma": nic.rdma or None,
    }
    return ["[[agent.nics]]", *_pairs(pairs), ""]


def _engines(hardware: str, first: int, count: int) -> list[str]:
    return [
        "# [[agent.engines]]",
        '# kind = "simulated"    # or what runs here',
        '# model = "..."         # one of [models.*]',
        f"# hardware = {_text(hardware)}",
        "# tp = 1                # GPUs of one replica",
        f"# count = {count}             # replicas",
        f"# first_gpu = {first}",
        "",
    ]


def _runs(gpus: tuple[Gpu, ...]) -> Iterator[tuple[str, int, int]]:
    """(class, first index, number) of neighbouring cards of one class."""
    for hardware, run in groupby(gpus, key=lambda gpu: gpu.hardware):
        indices = [gpu.index for gpu in run]
        if hardware:
            yield hardware, indices[0], len(indices)


def _pairs(pairs: Mapping[str, str | float | None]) -> list[str]:
    return [
        f"{key} = {_text(value) if isinstance(value, str) else f'{value:g}'}"
        for key, value in pairs.items()
        if value is not None
    ]


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # what JSON escapes, TOML reads alike
