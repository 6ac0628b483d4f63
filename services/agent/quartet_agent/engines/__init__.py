"""Engines: what the agent asks of one, and the ones that it knows."""
