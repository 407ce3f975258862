"""The harness: networks between parties on one machine, and what is measured over them."""
