"""KV on the move: leases on this node's caches, and the movers that carry bytes between nodes."""
