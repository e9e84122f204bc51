"""Checkpoints in memory, on this node and its buddies, for training runs that must go on after a failure."""
