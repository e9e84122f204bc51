"""The live state of a training run: read at every save, filled by a restore."""
