"""Generated from protos/secureinfer/v1: `python protos/generate.py`."""
