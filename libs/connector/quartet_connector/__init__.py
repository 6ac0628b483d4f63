"""KV pages of an engine: what vLLM loads, and what an agent needs to speak with it. Imports nothing else of ours."""
