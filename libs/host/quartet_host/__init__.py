"""What one host has and how its cards fare: the PCI tree and NICs from sysfs, cards from NVML."""
