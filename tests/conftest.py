"""Eight simulated devices for every test, set before any backend starts."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
