"""Native operations for the CPU: compiled from `../csrc`, called through ctypes on numpy arrays."""
