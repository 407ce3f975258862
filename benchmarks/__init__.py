"""Benchmarks of secureinfer: `python -m benchmarks NAME`; each is a thin call of secureinfer.bench."""
