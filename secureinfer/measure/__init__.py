"""What a run cost: latency, bytes, rounds and memory, gathered from every party into one Report."""
