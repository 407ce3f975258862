"""Ordered byte channels between parties: one Link interface, an in-process and a gRPC implementation."""
