"""The fast kernels: k-bit windows, one opening for truncation and comparison, tables in place of carry trees.

They take any number of parties. catalog.py and lowering.py are declarations and need no cryptography; choices.py and
matrices.py bind the code to the rows.
"""
