"""What others have, run beside ours: each in a process of its own, and none imports secureinfer."""
