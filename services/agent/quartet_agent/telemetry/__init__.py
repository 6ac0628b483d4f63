"""Telemetry: how this node's cards and NICs fare, once a second beside the beats, and what of it goes into words."""
