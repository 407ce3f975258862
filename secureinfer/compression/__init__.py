"""Compression: transforms of a model, each a dataclass of settings, and the report of what they did to each layer.

The package is not called `compress`, because that is a function of secureinfer.
"""
