"""How a worker process joins the others of its test."""

import jax


def start(port: int, me: int, processes: int, devices: int) -> None:
    """So many devices of its own, and the others over loopback, if there are any."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(
            address, processes, me, coordinator_bind_address=address, initialization_timeout=60
        )
