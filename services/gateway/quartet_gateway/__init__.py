"""OpenAI-compatible HTTP front door."""
