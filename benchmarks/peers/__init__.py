"""What others have, run beside ours: each in a process of its own that imports nothing of secureinfer.

`bert` also holds the side that starts its peers.
"""
