"""The store: host memory that keeps paged KV of one model, and lends it. A worker that computes nothing."""
