"""`topology(...)`: one door for names, device lists and ready topologies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import TopologyError, short
from meshwright.hardware.grid import Topology


def topology(
    source: str | Sequence[Any] | Topology,
    *,
    slices: int = 1,
    chips_per_host: Sequence[int] | None = None,
    twisted: bool | None = None,
    speeds: Mapping[str, float] | None = None,
    sort_slices: bool = True,
) -> Topology:
    """The hardware behind a name such as `v5p:8x8x8`, or behind JAX devices.

    Names: `v4: v5e: v5p: v6e: tpu7x:` with a shape (`v5p:4x4x8_twisted` for a twisted torus),
    `a100: h100: h200: b200: gb200:` with GPUs per NVLink domain and domains (`h100:8x4` is 4
    hosts of 8), `cpu:` with devices and hosts. `slices` joins several by the slow network.
    `chips_per_host` overrides how a TPU slice is cut into hosts, `speeds` any of `link`,
    `network`, `core` in GB/s. Device lists: `sort_slices=False` keeps slices in the order
    in which they appear.

    >>> print(topology("v5e:16x16"))
    v5e:16x16: 256 devices on 64 hosts
      x 16 wraps, 50 GB/s a link
      y 16 wraps, 50 GB/s a link
    """
    if twisted is not None and not isinstance(twisted, bool):
        raise TopologyError(f"twisted: {short(twisted)} is not True, False or None.")
    if isinstance(source, Topology):
        if slices != 1 or chips_per_host is not None or twisted is not None or speeds:
            raise TopologyError(
                f"{source.name}: a ready topology takes no further options. "
                "Pass them where it is made, topology(name, slices=...)."
            )
        return source
    if isinstance(source, str):
        from meshwright.hardware.named import from_name

        return from_name(source, slices, chips_per_host, twisted, speeds)
    if isinstance(source, Mapping) or not hasattr(source, "__iter__"):
        raise TopologyError(
            f"cannot read hardware from {short(source)}. "
            "Pass a name such as 'v5p:8x8x8', or a list of JAX devices."
        )
    if slices != 1 or chips_per_host is not None:
        raise TopologyError("slices and chips_per_host are read off the devices; leave them out.")
    from meshwright.hardware.live import from_devices

    return from_devices(list(source), twisted, speeds, sort_slices)
