"""A whole fleet on this machine: every service a process of its own, started as it would be deployed."""
