"""One process of several: builds meshes, runs a sum on each, prints what it saw as JSON."""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from joining import start, tell

import meshwright as mw


def total(mesh: jax.sharding.Mesh) -> float:
    """The sum of a global array cut along every axis of the mesh; all processes take part."""
    shape = tuple(2 * size for size in mesh.devices.shape)
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    cut = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    array = jax.make_array_from_callback(shape, cut, lambda index: values[index])
    whole = NamedSharding(mesh, PartitionSpec())
    return float(jax.jit(jnp.sum, out_shardings=whole)(array))


def seen(mesh: jax.sharding.Mesh) -> dict:
    return {
        "shape": dict(mesh.shape),
        "ids": ids(mesh),
        "processes": [device.process_index for device in mesh.devices.flat],
        "sum": total(mesh),
    }


def refused(build, *request, **options) -> str:
    """The message of our own error; anything else ends the process."""
    try:
        build(*request, **options)
    except mw.errors.MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def partly_idle(request) -> dict:
    """A mesh over a part of the devices, and what the warnings say about the others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", mw.errors.IdleDevicesWarning)
        mesh = mw.mesh(request)
    return {
        "ids": ids(mesh),
        "processes": [device.process_index for device in mesh.devices.flat],
        "warnings": [str(warning.message) for warning in caught],
    }


def ids(mesh: jax.sharding.Mesh) -> list[int]:
    return [device.id for device in mesh.devices.flat]


def report(processes: int, devices: int) -> dict:
    everything = processes * devices
    topology = mw.topology(jax.devices())
    return {
        "topology": [topology.name, topology.num_hosts, topology.num_slices],
        "mesh": seen(mw.mesh(f"dp:-1, tp:{devices}")),
        "mesh, tp first": seen(mw.mesh(f"tp:{devices}, dp:-1")),
        "create_mesh": seen(mw.create_mesh((-1, devices), ("dp", "tp"))),
        "create_mesh, jax": seen(mw.create_mesh((-1, devices), ("dp", "tp"), use_jax=True)),
        "create_mesh, defaults": seen(mw.create_mesh()),
        "same object": mw.create_mesh() is mw.create_mesh(),
        "dcn": seen(mw.create_mesh((devices, processes), ("dp", "tp"), dcn_mesh_dims=(1, -1))),
        "dcn both": seen(
            mw.create_mesh((everything, 1), ("dp", "tp"), dcn_mesh_dims=(processes, 1))
        ),
        "wrong dcn": [
            refused(mw.create_mesh, (everything, 1), ("dp", "tp"), dcn_mesh_dims=dcn)
            for dcn in ((1, 1), (processes + 1, 1), (processes, 1, 1))
        ],
        "too many": refused(mw.mesh, {"dp": everything + 1}),
        # A sum in step with the others shows that the refusals left nobody waiting.
        "after": seen(mw.mesh("dp:-1")),
        "host share": mw.calculate_host_mesh_shape((processes, devices)),
        "few": partly_idle({"dp": 1, "tp": devices}),
        "one each": partly_idle(f"dp:{processes}*1"),
        "local": [device.id for device in jax.local_devices()],
        "cpu mesh": ids(mw.create_cpu_mesh()),
        "explained": [axis.slow for axis in mw.explain(mw.mesh(f"dp:-1, tp:{devices}")).axes],
    }


if __name__ == "__main__":
    port, me, processes, devices = map(int, sys.argv[1:])
    start(port, me, processes, devices)
    tell(lambda: report(processes, devices))
