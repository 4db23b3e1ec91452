"""Slow, area engine: 2bw against 1f1b on real compute, two ranks of one thread each."""

import statistics

import pytest

from tests.support.cli import pretrain, summary

PAIRS = 5


@pytest.mark.slow("engine")
def test_2bw_is_faster_and_idles_less_at_two_microbatches(tmp_path):
    """Median of 5 alternated pairs of the quickstart's runs: at least 1.2 x tokens/s, under half the bubble."""
    rates, bubbles = [], []
    for pair in range(PAIRS):
        both = {}
        for schedule in ("1f1b", "2bw") if pair % 2 == 0 else ("2bw", "1f1b"):
            folder = tmp_path / f"{schedule}-{pair}"
            arguments = ("experiment=quickstart", f"schedule={schedule}", "train.steps=25", "train.eval_sequences=16")
            ran = pretrain(*arguments, f"run.dir={folder}", cwd=tmp_path, timeout=600)
            assert ran.status == 0, ran.err
            both[schedule] = summary(folder)
        rates.append(both["2bw"]["tokens_per_second"] / both["1f1b"]["tokens_per_second"])
        bubbles.append(both["2bw"]["bubble_measured"] / both["1f1b"]["bubble_measured"])
        print(
            f"pair {pair + 1}: 2bw / 1f1b = {rates[-1]:.3f} tokens/s, bubbles "
            f"{both['2bw']['bubble_measured']:.3f} and {both['1f1b']['bubble_measured']:.3f}",
            flush=True,
        )
    print(f"median of {PAIRS}: {statistics.median(rates):.3f} x tokens/s, {statistics.median(bubbles):.3f} x bubble")
    assert statistics.median(rates) >= 1.2
    assert statistics.median(bubbles) < 0.5
