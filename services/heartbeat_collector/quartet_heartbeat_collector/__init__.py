"""Hears heartbeats over UDP; says fleet deltas and snapshots."""
