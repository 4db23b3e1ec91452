"""tools/study/delay_theory.py: its problems are as smooth as it says, and its runs are the executor's."""

import csv

import pytest
import torch

from tests.support.cli import tool
from tools.study.delay_theory import _PROBLEMS, Trial, bound, run_trial


def gradient(problem, weight):
    weight = weight.clone().requires_grad_()
    return torch.autograd.grad(problem.value(weight), weight)[0]


@pytest.mark.parametrize("name", ["quadratic", "logistic"])
def test_the_smoothness_is_an_upper_bound_that_is_nearly_reached(name):
    """|grad f(X) - grad f(Y)|_nuclear <= L |X - Y|_spectral, for far and near X and Y."""
    problem, generator = _PROBLEMS[name](0), torch.Generator().manual_seed(3)
    ratios = []
    for scale in (0.01, 0.1, 1.0):
        for _ in range(50):
            x, change = torch.randn(2, 12, 16, generator=generator, dtype=torch.float64) * scale
            if name == "quadratic":  # the worst change is orthogonal
                change = torch.linalg.qr(change.T)[0].T
            rise = torch.linalg.matrix_norm(gradient(problem, x + change) - gradient(problem, x), "nuc")
            ratios.append((rise / torch.linalg.matrix_norm(change, 2)).item() / problem.smoothness)
    assert max(ratios) <= 1 + 1e-9
    assert max(ratios) > (0.99 if name == "quadratic" else 0.05)


def test_noise_has_no_bias_and_belongs_to_its_step():
    problem = _PROBLEMS["noisy"](0)
    weight = torch.ones(12, 16, dtype=torch.float64, requires_grad=True)
    draws = torch.stack([torch.autograd.grad(problem.noise(weight, step), weight)[0] for step in range(400)])
    assert draws.mean(0).abs().max() < 5 * problem.deviation / 20
    assert draws.std().item() == pytest.approx(problem.deviation, rel=0.02)
    again = torch.autograd.grad(problem.noise(weight, 7), weight)[0]
    assert torch.equal(again, draws[7])


def test_a_run_is_muon_by_hand():
    """One update of spectral norm about the step size, at the delayed weights."""
    averages = {delay: run_trial(Trial("quadratic", delay, False, 0.01, 0, 8)) for delay in (0, 1)}
    problem = _PROBLEMS["quadratic"](0)
    first = torch.linalg.matrix_norm(gradient(problem, problem.weight.detach()), "nuc").item()
    assert averages[0][0] == averages[1][0] == pytest.approx(first, rel=1e-12)
    assert averages[0][1] < averages[0][0]
    assert averages[1][1] == averages[0][1], "the first update is made of the first gradient under any delay"
    assert averages[1][2] != averages[0][2], "and the second one of a gradient at the first weights"
    ahead = run_trial(Trial("quadratic", 1, True, 0.01, 0, 8))
    assert ahead[1] == averages[1][1], "measured at z, not at the point ahead"


def test_the_bound_grows_with_how_far_away_gradients_are_taken():
    problem = _PROBLEMS["quadratic"](0)
    base = bound(problem, delay=0, corrected=False, steps=32)
    assert bound(problem, delay=2, corrected=False, steps=32) / base == pytest.approx(3.0)  # sqrt(1 + 4 d)
    assert bound(problem, delay=1, corrected=True, steps=32) / base == pytest.approx(3.0)  # sqrt(1 + 8 d)
    assert bound(problem, delay=0, corrected=False, steps=128) / base == pytest.approx(0.5)


@pytest.mark.slow("study")
def test_the_tool_writes_its_table_and_pictures(tmp_path):
    ran = tool(
        "tools.study.delay_theory", "steps=32", "delays=0,2", "problems=quadratic", "step_sizes=0.08", "out=t",
        cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    rows = list(csv.DictReader((tmp_path / "t" / "theory.csv").open()))
    assert [(row["delay"], row["correction"]) for row in rows] == [
        ("0", "none"),
        ("2", "none"),
        ("2", "error feedback"),
    ]
    for row in rows:
        limit = bound(
            _PROBLEMS["quadratic"](0), delay=int(row["delay"]), corrected=row["correction"] != "none", steps=32
        )
        assert float(row["norm"]) <= limit == pytest.approx(float(row["bound"]))
    assert (tmp_path / "t" / "quadratic.png").stat().st_size > 10_000
    for arguments, words in (
        (["delays=1,2"], "delays=[1, 2]: must hold 0"),
        (["problems=cubic"], "problems=cubic: unknown problem"),
    ):
        ran = tool("tools.study.delay_theory", *arguments, cwd=tmp_path)
        assert ran.returncode == 2 and words in ran.stderr and "Traceback" not in ran.stderr
