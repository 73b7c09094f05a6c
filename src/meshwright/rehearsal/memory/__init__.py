"""The memory of a device. In: what the compiler reports. Out: whether it fits, what is large."""
