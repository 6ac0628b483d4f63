"""Telemetry as Prometheus gauges. Labels are this host's cards, NICs and workers, so hardware bounds their number."""

import math

from quartet_bus.messages import GpuTelemetry, NicTelemetry, NodeTelemetry
from quartet_bus.metrics import Metrics

_OF_GPU = {
    "gpu_temperature_celsius": ("Temperature of a card.", "temperature_c"),
    "gpu_power_watts": ("Power drawn by a card.", "power_w"),
    "gpu_sm_mhz": ("SM clock of a card.", "sm_mhz"),
    "gpu_busy_share": ("Share of time in which a card ran something.", "busy_share"),
    "gpu_memory_used_bytes": ("Memory of a card that is in use.", "memory_used_bytes"),
    "gpu_pcie_rx_gb_per_s": ("What a card receives over PCIe.", "pcie_rx_gb_per_s"),
    "gpu_pcie_tx_gb_per_s": ("What a card sends over PCIe.", "pcie_tx_gb_per_s"),
    "gpu_pcie_replays": ("PCIe packets sent again since the driver was loaded.", "replays"),
    "gpu_throttled": ("1 while heat or power slows a card.", "throttled"),
    "gpu_congested": ("1 while a card's PCIe link is full or failing.", "congested"),
}
_OF_NIC = {
    "nic_rx_gb_per_s": ("What a NIC receives.", "rx_gb_per_s"),
    "nic_tx_gb_per_s": ("What a NIC sends.", "tx_gb_per_s"),
    "nic_rx_dropped": ("Packets a NIC dropped, since it was started.", "rx_dropped"),
    "nic_errors": ("Errors of a NIC, since it was started.", "errors"),
}


class Gauges:
    """What was last read; NaN, which graphs leave out, for what a card does not tell."""

    def __init__(self, metrics: Metrics) -> None:
        self._gpus = {field: metrics.gauge(name, help, ("gpu",)) for name, (help, field) in _OF_GPU.items()}
        self._nics = {field: metrics.gauge(name, help, ("nic",)) for name, (help, field) in _OF_NIC.items()}
        self._roots = metrics.gauge(
            "root_congested", "1 while a worker is slower when a NIC beside it is busy.", ("root", "worker", "nic")
        )
        self._alerted: set[tuple[str, str, str]] = set()
        self._degraded = metrics.gauge("telemetry_degraded", "1 while some or all of the telemetry is missing.")

    def show(self, told: NodeTelemetry) -> None:
        """Take what was just said."""
        for gpu in told.gpus:
            for field, gauge in self._gpus.items():
                gauge.labels(str(gpu.index)).set(_value(gpu, field))
        for nic in told.nics:
            for field, gauge in self._nics.items():
                gauge.labels(nic.name).set(_value(nic, field))
        alerts = {(alert.root, alert.worker, alert.nic) for alert in told.alerts}
        for labels in self._alerted | alerts:
            self._roots.labels(*labels).set(labels in alerts)
        self._alerted |= alerts
        self._degraded.set(bool(told.degraded))


def _value(told: GpuTelemetry | NicTelemetry, field: str) -> float:
    value = getattr(told, field)
    return math.nan if value is None else float(value)
