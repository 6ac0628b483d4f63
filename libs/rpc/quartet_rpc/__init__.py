"""gRPC stubs, channels and servers of Quartet."""
