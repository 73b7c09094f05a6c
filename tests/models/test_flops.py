"""Hand-counted FLOPs against the compiler's own count."""

import jax
import pytest

import meshwright as mw


def counted(model, batch):
    """The compiler's count of the loss and its gradients, loops unrolled: a layer per stage."""
    grad = jax.jit(jax.value_and_grad(model.loss, has_aux=True))
    return grad.lower(model.shapes()["params"], batch).cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("name", "overrides", "sizes"),
    [
        ("tiny", {"layers": 2, "stages": 2, "embed": 128, "head": 32, "mlp": 384}, (8, 64)),
        ("tiny", {"layers": 2, "stages": 2, "seq": 256, "embed": 128, "head": 32}, (2, 256)),
        ("vit-tiny", {"layers": 2, "stages": 2, "embed": 128, "mlp": 512}, (16,)),
        ("conv-tiny", {"depths": (1, 1), "width": 64, "image": 32}, (8,)),
    ],
)
def test_count_is_the_compilers_within_5_percent(name, overrides, sizes):
    model = mw.models.model(name, **overrides)
    assert model.flops(*sizes) == pytest.approx(counted(model, model.batch(*sizes)), rel=0.05)


def test_experts_count_as_often_as_they_are_chosen():
    model = mw.models.model(
        "moe-tiny", layers=1, embed=128, mlp=256, head=32, capacity=1.0, experts=4
    )
    assert model.flops(8, 64) == pytest.approx(counted(model, model.batch(8, 64)), rel=0.05)


def test_known_counts():
    model = mw.models.model("llama3-8b")
    attention = 12 * 32 * 2048 * 4096
    words = 128_256 * 4096
    assert model.flops(4, 2048) == 4 * 2048 * (6 * (model.parameters - words) + attention)
    # 17.6 G multiplications and additions in the forward pass of an image.
    assert mw.models.model("vit-b16").flops(1) == pytest.approx(3 * 2 * 17.5e9, rel=0.02)
    assert mw.models.model("resnet50").flops(1) == pytest.approx(3 * 2 * 4.09e9, rel=0.02)
