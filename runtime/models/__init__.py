"""Model architectures: one file each, over shared layers, listed in `registry`."""
