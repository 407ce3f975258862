"""The generic kernels: CrypTen's shares and Beaver products, our comparisons, truncations and series, any number of parties.

Importing this package binds every row of the catalog to its code.
"""

from . import activations, arithmetic, choices, local, matrices, norms, softmax

__all__ = ["activations", "arithmetic", "choices", "local", "matrices", "norms", "softmax"]
