"""What a program may ask of its parties. Compiling keeps to it; a file that asks for more is refused before anything of that
size is made (the model owner writes the plan, and the data owner makes keys and ciphertexts for it).
"""

from __future__ import annotations

MOST_MATRICES = 512
MOST_ROTATIONS = 512
"""Galois keys of a session."""
MOST_KEY_BYTES = 8 << 30
"""Of all evaluation keys, as the plan states them."""
MOST_CIPHERTEXTS = 1 << 10
"""That the values of one sample are laid out over."""
MOST_SPREAD = 1 << 14
"""Values of a sample, a ciphertext each, where every sample has a slot."""
MOST_SLOTS = 1 << 25
"""Of all layouts together."""
MOST_OFFSETS = 1 << 20
"""Of all matrices together."""
