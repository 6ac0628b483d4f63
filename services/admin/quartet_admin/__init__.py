"""gRPC front door to the whole fleet."""
