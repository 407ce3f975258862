"""CKKS homomorphic encryption on TenSEAL's SEAL: a data owner and a model owner, and no dealer."""
