"""Tokens: what an engine will make of a prompt, found out before it is routed."""
