"""Heartbeats: what this node says about its workers, from the state words to the datagrams."""
