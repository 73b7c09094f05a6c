"""The hardware. In: a name, or JAX devices. Out: a `Topology`: a grid of devices with speeds.

`topology` holds the value and the function that makes one, `named` reads names such as
`v5p:8x8x8`, `live` reads JAX devices, `chips` is the table of speeds and slice shapes,
`calibration_file` has speeds that were measured. Nothing here starts a device or a compiler.
"""
