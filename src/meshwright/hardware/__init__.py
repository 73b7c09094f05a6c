"""The hardware. In: a name, or JAX devices. Out: a `Topology`: a grid of devices with speeds."""
