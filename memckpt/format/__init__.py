"""The bytes of a snapshot and of its seal."""
