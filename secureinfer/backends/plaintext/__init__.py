"""Plaintext: every operator by its reference function, in one process. The oracle, and the baseline of every ratio."""
