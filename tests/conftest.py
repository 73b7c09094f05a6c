"""Eight simulated devices for every test, set before any backend starts."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True)
def _names_for_doctests(doctest_namespace: dict[str, object]) -> None:
    import meshwright

    doctest_namespace["mw"] = meshwright
