"""Plans, admits and watches KV transfers."""
