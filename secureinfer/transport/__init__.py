"""Ordered byte channels between parties: one Link interface, over TLS, over gRPC and inside a process."""
