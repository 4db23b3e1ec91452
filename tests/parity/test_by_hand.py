"""Numbers that no other test looked at, each by hand: faults put in here on purpose had gone unnoticed."""

import hashlib
import math

import numpy as np
import pytest
import torch

from megaasync.data.corpus import PythonStdlibCorpus, content_key, is_held_out
from megaasync.data.microbatches import TokenSequences, TrainingMicrobatches
from megaasync.data.shuffle import permuted
from megaasync.data.synthetic import MarkovSource
from megaasync.distributed.groups import leave_group
from megaasync.entry.spawn import spawn_ranks
from megaasync.models.flops import flops_per_token
from megaasync.models.initialize import initialize_
from megaasync.models.transformer import DecoderStage
from megaasync.observe.trace import Timeline
from megaasync.plan.plan import make_plan
from megaasync.schedules import Action, Op, Span
from megaasync.train.output import RunOutput
from megaasync.train.trainer import TrainOutcome
from megaasync.update_rules.kinds.nadam import NAdam
from tests.entry.test_text_values import SLURM
from tests.parity.reference import largest_gap, reference_run, validation_loss
from tests.support.configs import small_config
from tests.support.engine import build
from tests.support.runs import run

TOLERANCE = 1e-9


def poisoned_rank(environment, config, steps):
    """Train with the last stage's gradient of some steps made infinite; (losses, final weights by name)."""
    executor = build(environment, config).executor
    (stage,), (update,) = executor.stages, executor.runner.stages.values()
    if stage.place.is_last:
        backward = stage.backward

        def poisoned(key, grad, *, version):
            x_grad = backward(key, grad, version=version)
            if key[0] in steps and key[1] == 1:
                stage.gradients.sum_of(key[0])[0] = float("inf")
            return x_grad

        stage.backward = poisoned
    from megaasync.config.pipeline import phases_of

    results = list(executor.run(*phases_of(config), 0, config.train.steps, flush=True))
    leave_group()
    layout = update.optimizer.layout
    weights = dict(
        zip(layout.names, (view.numpy().copy() for view in layout.views(update.whole_master())), strict=True)
    )
    return [result.loss for result in results], weights


@pytest.mark.parametrize("correction", ["none", "error_feedback"])
def test_a_batch_skipped_in_mid_run_is_the_hand_written_loops(correction):
    """Cosine: the lr goes by batches, those left out too; the version after them is z; rules count the others."""
    config = small_config(
        "adamw", correction__name=correction, parallel__pipeline=2, train__steps=12, train__on_nonfinite="skip",
        train__max_skipped=3, train__lr_schedule="cosine",
    )  # fmt: skip
    parts = spawn_ranks(poisoned_rank, (config, (4, 7)), world_size=2)
    by_hand = reference_run(config, delay=1, skipped=(4, 7))
    np.testing.assert_allclose(parts[0][0], by_hand.losses, rtol=TOLERANCE)
    assert largest_gap(parts[0][1] | parts[1][1], by_hand.weights) < TOLERANCE


def test_an_evaluation_of_more_than_32_microbatches_misses_none():
    """They are looked at in slices of 32; 67 sequences in microbatches of 2 are 34."""
    config = small_config("adamw", schedule__name="1f1b", train__steps=3, train__eval_sequences=67)
    by_hand = reference_run(config, delay=0)
    assert run(config).val_loss == pytest.approx(validation_loss(by_hand, by_hand.z[3], config), rel=TOLERANCE)


def sequences_of(config):
    chain = MarkovSource(vocab_size=config.model.vocab_size, branching=config.data.branching, seed=config.train.seed)
    tokens = chain.tokens(num_tokens=config.data.num_tokens, stream=0)
    return tokens, TokenSequences(tokens, seq_length=8, vocab_size=64, name="x")


def order_of(seed):
    _, sequences = sequences_of(small_config())
    source = TrainingMicrobatches(
        sequences, micro_batch_size=2, num_microbatches=4, seed=seed, device=torch.device("cpu")
    )
    return [index for step in range(5) for micro in range(4) for index in source.indices(step, micro).tolist()]


def test_two_seeds_are_two_orders():
    assert order_of(1) == order_of(1) != order_of(2)
    assert len(set(order_of(1))) == len(order_of(1)) == 40


def shuffle_by_hand(position, size, seed, epoch):
    """The permutation of `data/shuffle.py`, in whole numbers of Python: six rounds of a Feistel network."""
    word = (1 << 64) - 1

    def mix(value, key):
        x = value ^ key
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
        return x ^ (x >> 31)

    golden, half = 0x9E3779B97F4A7C15, max(((size - 1).bit_length() + 1) // 2, 1)
    keys = [mix(mix(n * golden & word, seed) * golden & word, epoch) for n in range(1, 7)]
    while True:
        left, right = position >> half, position & (1 << half) - 1
        for key in keys:
            left, right = right, left ^ (mix(right, key) & (1 << half) - 1)
        position = left << half | right
        if position < size:
            return position


def weights_by_hand(config):
    """Draws by (seed, name) with an own seeding: norms are ones, output projections are smaller."""
    torch.set_default_dtype(torch.float64)
    model = DecoderStage(config.model, range(config.model.num_layers))
    torch.set_default_dtype(torch.float32)

    def draw(shape, name, std):
        seed = int.from_bytes(hashlib.sha256(f"{config.train.seed}/{name}".encode()).digest()[:8], "little") >> 1
        return torch.normal(
            0.0, std, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32
        ).double()

    found = {}
    for name, parameter in model.named_parameters():
        std = config.model.init_std
        if "output" in name or ".down" in name:
            std = config.model.init_std / math.sqrt(2 * config.model.num_layers)
        if name.endswith("norm.weight"):
            found[name] = torch.ones(parameter.shape, dtype=torch.float64)
        elif parameter.dim() == 3:
            found[name] = torch.stack([draw(parameter.shape[1:], f"{name}.{e}", std) for e in range(len(parameter))])
        else:
            found[name] = draw(parameter.shape, name, std)
    return model, found


def test_one_run_with_an_own_data_order_and_own_draws():
    """The other references take both from the product, so that a fault there would cancel."""
    config = small_config("sgd", schedule__name="1f1b", train__steps=5, train__lr_schedule="constant")
    tokens, sequences = sequences_of(config)
    model, weights = weights_by_hand(config)
    taken = {name: parameter.clone() for name, parameter in model.named_parameters()}
    initialize_(taken, config.model, seed=config.train.seed)
    assert all(torch.equal(taken[name], weight) for name, weight in weights.items())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    losses, size = [], sequences.num_sequences
    from megaasync.data.microbatches import Microbatch

    for step in range(5):
        order = [shuffle_by_hand(step * 8 + k, size, config.train.seed, 0) for k in range(8)]
        assert order == permuted(np.arange(step * 8, step * 8 + 8), size=size, seed=config.train.seed, epoch=0).tolist()
        rows = torch.from_numpy(np.stack([tokens[i * 8 : i * 8 + 9] for i in order])).long()
        valid = torch.ones(8, 8, dtype=torch.bool)
        loss = model(None, Microbatch(rows[:, :-1], rows[:, 1:], valid)) / 64
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        with torch.no_grad():
            for parameter, g in zip(model.parameters(), gradients, strict=True):
                decay = 0.0 if parameter.dim() == 1 else config.optimizer.weight_decay
                rate = config.optimizer.lr * min((step + 1) / config.train.warmup_steps, 1.0)
                clipped = g * min(1.0, config.train.clip_grad_norm / norm)
                parameter.sub_(rate * (clipped + decay * parameter))
        losses.append(loss.item())
    np.testing.assert_allclose(run(config).column("loss"), losses, rtol=TOLERANCE)


@pytest.mark.parametrize("fraction", [0.05, 0.3])
def test_the_share_of_held_out_documents(fraction):
    keys = [content_key(f"document {n}") for n in range(20_000)]
    share = sum(is_held_out(key, fraction=fraction) for key in keys) / len(keys)
    assert share == pytest.approx(fraction, abs=4 * math.sqrt(fraction * (1 - fraction) / len(keys)))
    files = [document.key for document in PythonStdlibCorpus().documents()]
    share = sum(is_held_out(key, fraction=fraction) for key in files) / len(files)
    assert share == pytest.approx(fraction, abs=4 * math.sqrt(fraction * (1 - fraction) / len(files)))


def outcome(**changes):
    fields = {
        "status": "completed", "steps": 4, "tokens": 100, "train_loss": 1.0, "val_loss": 1.0,
        "tokens_per_second": 5000.0, "peak_memory_bytes": 1, "timeline": Timeline([], 1), "requeue": False,
        "saved_step": None, "save_problem": None, "device_name": "NVIDIA H100 80GB HBM3",
    }  # fmt: skip
    return TrainOutcome(**{**fields, **changes})


def test_operations_per_second_are_of_one_rank(tmp_path):
    config = small_config(parallel__pipeline=2, parallel__data=2)
    output = RunOutput(config, tmp_path)
    summary = output._summary(outcome())
    assert summary["tflops_per_rank"] * 4 == pytest.approx(5000.0 * flops_per_token(config.model) / 1e12, rel=1e-12)
    assert summary["mfu"] == pytest.approx(summary["tflops_per_rank"] / 989.0, rel=1e-12)


def test_fill_and_drain_are_not_exchanged(tmp_path):
    """Two seconds before the first forward of step 2, five after the last action of the last step but one."""
    spans = [
        Span(0, Action(Op.F, 0, 0, 0), 0.0, 1.0),
        Span(0, Action(Op.B, 0, 0, 0), 1.0, 2.0),
        Span(0, Action(Op.F, 0, 1, 0), 2.0, 3.0),
        Span(0, Action(Op.B, 0, 1, 0), 3.0, 4.0),
        Span(0, Action(Op.F, 0, 2, 0), 4.0, 5.0),
        Span(0, Action(Op.B, 0, 2, 0), 5.0, 6.0),
        Span(0, Action(Op.F, 0, 3, 0), 6.0, 8.0),
        Span(0, Action(Op.B, 0, 3, 0), 8.0, 11.0),
    ]
    output = RunOutput(small_config(), tmp_path)
    summary = output._summary(outcome(timeline=Timeline(spans, 1)))
    assert (summary["fill_seconds"], summary["drain_seconds"]) == (2.0, 5.0)


def uneven_rank(environment, config):
    """Peak memory as the trainer tells it, on a rank that took much more than the other."""
    import megaasync.train.trainer as module

    module._peak_memory = lambda: 1000 if environment.rank == 1 else 10
    trainer = build(environment, config)
    told = trainer.train().peak_memory_bytes
    leave_group()
    return told


def test_peak_memory_is_of_the_rank_that_took_most():
    told = spawn_ranks(uneven_rank, (small_config(parallel__pipeline=2, train__steps=2),), world_size=2)
    assert told[0] == 1000


def test_the_plans_seconds_by_hand():
    """Tensor 2, data 2, Muon: forward by the ranks of a layer, gather in bfloat16, Newton-Schulz by its formula."""
    slurm = {**SLURM, "gpus_per_node": 4, "tasks_per_node": 4, "gpu_tflops": 100.0, "network_gbytes": 10.0}
    config = small_config(
        "muon", model__moe=None, parallel__tensor=2, parallel__data=2, train__dtype="bfloat16", device="auto",
        cluster=slurm,
    )  # fmt: skip
    model, (stage,) = config.model, make_plan(config)["stages"]
    d, layers, ffn, vocab = model.hidden_size, model.num_layers, model.ffn_hidden_size, model.vocab_size
    kv = d // model.num_heads * model.num_kv_heads
    attention = 2 * d * d + 2 * d * kv + model.seq_length * d  # products, and causal scores with their values
    per_token = 2 * (layers * (attention + 3 * d * ffn) + d * vocab)
    tokens = config.train.micro_batch_size * model.seq_length
    assert stage["seconds"]["forward"] == pytest.approx(tokens * per_token / 2 / 100e12, rel=1e-12)
    split = layers * (2 * d * d + 2 * d * kv + 3 * d * ffn) // 2 + 2 * d * vocab // 2  # of each tensor rank
    whole = (2 * layers + 1) * d  # norms
    size = split + whole
    padded = stage["bytes"]["gradients"] / stage["weight_versions"] / 4  # with what makes shares even
    assert size <= padded < 1.1 * size
    assert stage["seconds"]["reduction"] * 10e9 == pytest.approx(size * 4 / 2, rel=0.1)
    all_gathers = size * 2 / 2
    iterations = config.optimizer.newton_schulz_steps
    matrices = [(d, d)] * (2 * layers) + [(d, kv)] * (2 * layers) + [(d, ffn)] * (3 * layers)
    schulz = iterations * sum(4 * min(m) ** 2 * max(m) + 2 * min(m) ** 3 for m in matrices)
    step = stage["seconds"]["step"]
    most = schulz / 100e12 + all_gathers * 1.1 / 10e9 + size * 8 * 4 / 3e12
    least = schulz / 4 / 100e12 + all_gathers / 10e9  # shared by four ranks at best
    assert least < step < most


def test_newton_schulz_seconds_by_hand():
    """One rank and a slow device, so that nothing else counts: 4 p^2 q + 2 p^3 for each matrix and iteration."""
    slurm = {**SLURM, "gpus_per_node": 1, "gpu_tflops": 1e-6, "network_gbytes": 10.0}
    config = small_config("muon", model__moe=None, device="auto", cluster=slurm)
    d, ffn, kv = config.model.hidden_size, config.model.ffn_hidden_size, 8
    matrices = [(d, d), (d, d), (d, kv), (d, kv), (d, ffn), (d, ffn), (d, ffn)] * config.model.num_layers
    products = sum(4 * min(m) ** 2 * max(m) + 2 * min(m) ** 3 for m in matrices)
    (stage,) = make_plan(config)["stages"]
    assert stage["seconds"]["step"] == pytest.approx(5 * products / 1e6, rel=1e-6)


def test_nadams_momenta_are_a_recurrence_and_their_product_is_torchs():
    rule = NAdam((0.9, 0.999), 1e-8, 0.004)

    def product(count):
        return math.prod(0.9 * (1 - 0.5 * 0.96 ** (k * 0.004)) for k in range(1, count + 1))

    for count in (1, 2, 3, 50, 51, 7):  # backwards, as after a resume
        assert rule._product.up_to(count, rule._mu) == pytest.approx(product(count), rel=1e-13)
    calls = []
    rule._product.up_to(100_000, rule._mu)
    rule._product.up_to(100_001, lambda k: calls.append(k) or rule._mu(k))
    assert calls == [100_001]
