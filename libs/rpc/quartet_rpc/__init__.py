"""gRPC between people, tools and services: generated stubs (``v1``), servers, channels and errors."""
