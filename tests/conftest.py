"""Eight simulated devices for every test, set before any backend starts."""

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)
# How fast examples are made says something of the machine, not of the code.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")
