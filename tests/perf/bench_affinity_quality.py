"""What quantizing affinity costs, as JSON lines. See ``affinity_quality.py``."""

from affinity_quality import run

__all__ = ["run"]
