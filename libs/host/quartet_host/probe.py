"""The probe: one look at the cards and NICs of a real host. Blocking, for a thread of its own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quartet_core.readings import HostReading
from quartet_host import sysfs
from quartet_host.nics import Nic, read
from quartet_host.nvml import Nvml, NvmlMissing, binding


class HostProbe:
    """Reads again and again. A driver that does not answer is asked anew each time, for it may come up later."""

    def __init__(self, nics: Sequence[Nic], root: Path = sysfs.SYS, load: Callable[[], Any] = binding) -> None:
        self._nics = nics
        self._root = root
        self._load = load
        self._nvml: Nvml | None = None

    def read(self) -> HostReading:
        """How everything is just now. Whatever is wrong is in ``trouble``, and the rest is still told."""
        nics = tuple(read(nic, self._root) for nic in self._nics)
        try:
            if self._nvml is None:
                self._nvml = Nvml(self._load())
        except NvmlMissing as missing:
            return HostReading(nics=nics, trouble=str(missing))
        gpus = tuple(self._nvml.read())
        trouble = self._nvml.take_trouble()
        if trouble and all(gpu.temperature_c is None and gpu.power_w is None for gpu in gpus):
            self._nvml.close()  # the driver was reloaded, or all cards are lost: begin anew
            self._nvml = None
        return HostReading(gpus=gpus, nics=nics, trouble=trouble)
