"""Names under which clouds rent hardware: the shape each means, or which ones it may mean."""

import math

import pytest

import meshwright as mw
from meshwright.hardware.chips import CHIPS, check_shape, shapes_of_count


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("v5e-1", "v5e:1x1"),
        ("v5e-8", "v5e:2x4"),
        ("v5e-16", "v5e:4x4"),
        ("v5litepod-16", "v5e:4x4"),
        ("v5litepod-256", "v5e:16x16"),
        ("V6E-256", "v6e:16x16"),
        (" v6e-32 ", "v6e:4x8"),
        ("trillium-64", "v6e:8x8"),
        # The table of Google's page on v5p and xpk's defaults; the number is that of TensorCores.
        ("v4-8", "v4:2x2x1"),
        ("v4-32", "v4:2x2x4"),
        ("v4-64", "v4:2x4x4"),
        ("v4-512", "v4:4x8x8"),
        ("v4-1536", "v4:8x8x12"),
        ("v4-4096", "v4:8x16x16"),
        ("v5p-8", "v5p:2x2x1"),
        ("v5p-128", "v5p:4x4x4"),
        ("v5p-256", "v5p:4x4x8"),
        ("v5p-2048", "v5p:8x8x16"),
        ("v5p-12288", "v5p:16x16x24"),
        ("v5p-640", "v5p:4x4x20"),  # not in the tables, but there is no other
        ("tpu7x-128", "tpu7x:4x4x4"),
        ("ironwood-8", "tpu7x:2x2x1"),
        ("8xh100", "h100:8"),
        ("4xA100", "a100:4"),
        ("16xH100", "h100:8x2"),
        ("h100x8", "h100:8"),
        ("h200-64", "h200:8x8"),
        ("144xgb200", "gb200:72x2"),
        ("72xgb200", "gb200:72"),
        ("h200-8", "h200:8"),
        ("16xv5e", "v5e:4x4"),
        ("8xcpu", "cpu:8"),
    ],
)
def test_a_number_means_the_documented_shape(name, meant):
    named, plain = mw.topology(name), mw.topology(meant)
    assert named.name == meant
    assert named.chip == plain.chip
    assert named.axes == plain.axes


@pytest.mark.parametrize(
    ("name", "meant", "network"),
    [
        ("a2-ultragpu-8g", "a100:8", 100 / 64),
        ("a3-highgpu-8g", "h100:8", 12.5),
        ("a3-megagpu-8g", "h100:8", 25),
        ("a3-ultragpu-8g", "h200:8", 50),
        ("a4-highgpu-8g", "b200:8", 50),
        ("a4x-highgpu-4g", "gb200:4", 50),
        ("p4de.24xlarge", "a100:8", 6.25),
        ("p5.48xlarge", "h100:8", 50),
        ("p5en.48xlarge", "h200:8", 50),
        ("p6-b200.48xlarge", "b200:8", 50),
        ("Standard_ND96isr_H100_v5", "h100:8", 50),
    ],
)
def test_a_machine_type_is_its_gpus_and_its_network(name, meant, network):
    machine = mw.topology(name)
    assert machine.name == meant
    assert machine.chip.network == network
    four = mw.topology(name, slices=4)
    assert four.num_hosts == 4
    assert four.axes[0].kind == "network"
    assert four.axes[0].speed == network


@pytest.mark.parametrize(
    ("name", "meant"),
    [("2xp5.48xlarge", "h100:8x2"), ("4xStandard_ND96isr_H100_v5", "h100:8x4")],
)
def test_several_machines(name, meant):
    machines = mw.topology(name)
    assert machines.name == meant
    assert machines.axes[0].speed == 50


def test_speeds_of_your_own_replace_those_of_the_machine():
    assert mw.topology("a3-highgpu-8g", speeds={"network": 40}).chip.network == 40


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "v5p-768",
            r"^'v5p-768' is 384 chips, which come in several shapes: 4x4x24, 4x8x12\. Write",
        ),
        ("v4-1280", r"is 640 chips, .*: 4x4x40, 4x8x20\. .* e\.g\. 'v4:4x8x20'"),
        ("v5p-100", r"^'v5p-100' is 50 chips; no slice of v5p has so many\. Write a shape, e\.g\."),
        ("v5p-127", "v5p-N counts TensorCores, 2 a chip; 127 is odd"),
        ("v5e-12", r"'v5e-12' is 12 chips; no slice of v5e has so many\. .* 'v5e:4x4'"),
        ("v5e-512", "no slice of v5e has so many"),
        ("v5e-0", "no slice of v5e has so many"),
        ("v4-8960", "no slice of v4 has so many"),
        ("12xh100", r"h100: 12 GPUs in one NVLink domain; it holds 8\. Write h100:6x2 for several"),
        ("a2-highgpu-8g", r"A100s of 40 GB.*'a100:8', speeds={'memory_gb': 40, 'memory_tbps'"),
        ("p4d.24xlarge", "A100s of 40 GB"),
        ("a3-hihgpu-8g", r"not a machine type known here\. Did you mean 'a3-highgpu-8g'\?"),
        ("g5.48xlarge", r"not a machine type known here\..* e\.g\. 'h100:8' for a machine of 8"),
        ("v3-8", "unknown hardware 'v3-8'"),
    ],
)
def test_what_is_not_clear_is_answered_with_the_shapes(name, message):
    with pytest.raises(mw.errors.TopologyError, match=message):
        mw.topology(name)


@pytest.mark.parametrize("chip", [chip for chip in CHIPS.values() if chip.torus])
def test_every_shape_of_a_count_exists_and_has_that_many_chips(chip):
    for chips in range(1, min(chip.pod, 2048) + 1):
        for shape in shapes_of_count(chip, chips):
            assert math.prod(shape) == chips
            check_shape(chip, shape)


def test_meshes_are_built_on_them():
    assert mw.abstract_mesh("fsdp:-1, tp:8", on="v5p-128").axis_sizes == (8, 8)
    assert dict(mw.mesh("dp:2, tp:4", on="8xcpu").shape) == {"dp": 2, "tp": 4}
    assert mw.explain("fsdp:-1", on="v5litepod-16").topology.name == "v5e:4x4"
