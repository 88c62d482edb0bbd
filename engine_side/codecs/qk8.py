"""``qk8``, the reference encoder: that of kv8."""

from engine_side.codecs.kv8 import KERNEL, encode

__all__ = ["KERNEL", "encode"]
