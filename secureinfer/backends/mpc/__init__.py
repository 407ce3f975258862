"""Multi-party computation on CrypTen: additive shares over Z_2^64 between compute parties, with a dealer."""
