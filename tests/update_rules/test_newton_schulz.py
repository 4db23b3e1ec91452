"""The iteration by every path, against the iteration as it is written down in float64, and where it ends."""

import pytest
import torch

from megaasync.update_rules.newton_schulz import orthogonalize
from tests.parity.reference import newton_schulz

# stacked, one by one, two iterations at once, and by blocks; wide, tall and square
SHAPES = [(64, 64), (3, 96, 40), (128, 300), (300, 128), (2, 200, 250), (400, 400), (400, 900), (900, 400), (385, 771)]


def gaussian(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("steps", [1, 2, 4, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_path_is_the_iteration(shape, steps):
    """Float64 to 1e-9, float32 to 1e-5 of a matrix whose singular values are near one."""
    matrices = gaussian(*shape, dtype=torch.float64)
    flat = matrices.view(-1, *shape[-2:])
    expected = torch.stack([newton_schulz(item, steps) for item in flat]).view(shape)
    ours = orthogonalize(matrices, steps=steps)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)
    single = orthogonalize(matrices.float(), steps=steps)
    assert single.dtype is torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("matrix", "least", "most"),
    [
        (gaussian(256, 256), 0.08, 1.20),
        (gaussian(256, 1024), 0.68, 1.13),
        ("condition number 1e3", 0.11, 1.20),
    ],
    ids=["square", "wide", "ill-conditioned"],
)
def test_singular_values_lie_where_they_were_measured(matrix, least, most):
    """Keller's five steps; the least of a Gaussian square depends on the draw."""
    if isinstance(matrix, str):
        left, right = (torch.linalg.qr(gaussian(256, 256, seed=seed)).Q for seed in (1, 2))
        matrix = left @ torch.diag(torch.logspace(0, -3, 256)) @ right
    values = torch.linalg.svdvals(orthogonalize(matrix, steps=5))
    assert most - 0.04 < values.max() < most + 0.02
    assert 0.5 * least < values.min() < 1.5 * least


def test_bfloat16_products_change_a_percent():
    """1.1 % in relative Frobenius norm; norms are taken in float32, and so is the result."""
    matrix = gaussian(48, 64) * 1e-18
    exact, half = orthogonalize(matrix, steps=5), orthogonalize(matrix, steps=5, precision="bfloat16")
    assert half.dtype is torch.float32
    assert 0.002 < (half - exact).norm() / exact.norm() < 0.03
    assert torch.equal(orthogonalize(matrix, steps=5, precision="float32"), exact)


@pytest.mark.parametrize("shape", [(0, 8, 8), (0, 300, 900)])
def test_no_matrix_is_no_matrix(shape):
    assert orthogonalize(torch.zeros(shape), steps=5).shape == shape


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (3, 3), (4, 9), (9, 4), (2, 5, 8), (2, 8, 5), (32, 32)])
def test_singular_values_come_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(matrices, steps=5))
    assert values.max() < 1.25
    if shape[-1] != shape[-2]:
        assert values.min() > 0.5  # Keller's coefficients end between 0.68 and 1.13 on well-conditioned matrices


def test_keller_range_on_gaussian_matrices():
    """docs/method.md: 0.68 to 1.13 on a Gaussian 256 x 1024."""
    wide = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(wide, steps=5))
    assert 0.64 < values.min() < values.max() < 1.17


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12])
def test_orthogonalisation_ignores_scale(scale):
    matrix = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        orthogonalize(matrix * scale, steps=5), orthogonalize(matrix, steps=5), rtol=1e-4, atol=1e-5
    )


def test_orthogonalisation_leaves_its_input_and_zero_alone():
    matrix = torch.randn(2, 4, 6)
    matrix[1] = 0
    before = matrix.clone()
    result = orthogonalize(matrix, steps=5)
    assert torch.equal(matrix, before)
    assert torch.equal(result[1], torch.zeros(4, 6))
    assert result.isfinite().all()
