"""Loss spikes are found, told of once, and forgotten when they become the normal."""

import json
import math
import random

from megaasync.observe.spikes import SpikeWatch
from megaasync.train.output import RunOutput
from tests.support.configs import small_config


def noise(seed, steps=1000):
    chance = random.Random(seed)
    return [3.0 + 0.1 * chance.gauss(0, 1) for _ in range(steps)]


def test_noise_and_a_falling_loss_are_no_spikes():
    watch = SpikeWatch(8)
    assert not any(watch.look(loss) for loss in noise(0))
    watch = SpikeWatch(8)
    assert not any(watch.look(10 - 0.01 * step + extra - 3) for step, extra in enumerate(noise(1, 700)))


def test_a_spike_is_measured_by_the_noise_before_it():
    watch = SpikeWatch(8)
    for loss in noise(2):
        watch.look(loss)
    median, above = watch.look(5.0)
    assert abs(median - 3) < 0.05 and 15 < above < 27  # 2.0 / 0.1, the deviation of a hundred is within a third
    assert watch.look(3.1) is None


def test_a_lasting_rise_becomes_the_normal():
    watch = SpikeWatch(8)
    for loss in noise(3):
        watch.look(loss)
    found = [watch.look(loss + 2) is not None for loss in noise(4, 200)]
    assert all(found[:20]) and not any(found[100:])


def test_what_is_not_finite_is_left_out_and_none_finds_nothing():
    watch = SpikeWatch(8)
    for loss in noise(5):
        watch.look(loss)
        assert watch.look(math.nan) is None and watch.look(math.inf) is None
    assert watch.look(5.0) is not None
    silent = SpikeWatch(None)
    assert not any(silent.look(loss) for loss in [*noise(6), 100.0])


def test_a_run_writes_and_tells_of_its_spikes_and_remembers_over_a_resume(tmp_path, capsys):
    def row(step, loss):
        return {"kind": "train", "step": step, "loss": loss, "lr": 0.1, "grad_norm": 7.5, "tokens": 1,
                "tokens_per_second": 1.0, "seconds": 1.0, "staleness": 0}  # fmt: skip

    before = [row(step, loss) for step, loss in enumerate(noise(7, 50), start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(item) + "\n" for item in before))
    output = RunOutput(small_config(), tmp_path)
    output.on_row(row(51, 3.0))
    output.on_row(row(52, 9.0))
    output.on_row(row(53, 3.0))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (spike,) = [item for item in rows if item["kind"] == "spike"]
    assert (spike["step"], spike["loss"]) == (52, 9.0) and spike["above"] > 20
    told = [line for line in capsys.readouterr().out.splitlines() if "spike" in line]
    assert len(told) == 1 and told[0].startswith("step 52: loss spike, 9.0000 is") and "norm is 7.5" in told[0]
