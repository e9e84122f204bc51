"""Schemes that keep a shard when its node is lost."""

from memckpt.redundancy.mirror import Mirror

__all__ = ["Mirror"]
