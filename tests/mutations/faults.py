"""One-line faults, each with the test that must notice it: so that a faster suite never becomes a blunter one.

The old text stands exactly once in its file; after a refactoring, `test_mutations.py` says which lines to bring along.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault.

    Attributes:
        name: what is wrong with it in.
        file: below megaasync/.
        old, new: text, and what replaces it.
        test: pytest's name of a test that fails then.
    """

    name: str
    file: str
    old: str
    new: str
    test: str


EVERY = "tests/parity/test_every_schedule.py"
MESH = "tests/parity/test_mesh.py"
HAND = "tests/parity/test_by_hand.py"
LOOP = "tests/parity/test_reference.py"
RULES = "tests/optim/test_stage_optimizer.py tests/update_rules"
EXECUTOR = "tests/pipeline/test_executor.py"
SCHEDULES = "tests/schedules/test_unroll.py"
RESUME = "tests/checkpoint/test_resume.py"

FAULTS = (
    # schedules and the executor
    Fault("all stages are as late as the latest", "schedules/schedule.py",
          "max(step - self.delay[stage], self.start_step)", "max(step - max(self.delay), self.start_step)", EVERY),
    Fault("a step begins before it is permitted", "schedules/unroll.py",
          "while acknowledged < step - longest_delay:", "while acknowledged < step - longest_delay - 1:", SCHEDULES),
    Fault("a stop ends a step too early", "schedules/unroll.py",
          "self.end = min(self.end, step + 1 + max(self._delay))", "self.end = min(self.end, step + max(self._delay))",
          SCHEDULES),
    Fault("a receive is posted whatever its message needs", "schedules/receives.py",
          "return newest is not None and _place(need) <= newest", "return True", "tests/schedules/test_receives.py"),
    Fault("a receive is posted for a step that may not come", "schedules/receives.py",
          "            if action.op is Op.SYNC:\n                return True\n", "",
          "tests/schedules/test_receives.py"),
    Fault("an older Transformer Engine is given tensors of splits", "kernels/te_contract.py",
          'splits_on_host="tensor" not in', 'splits_on_host="tensors" in', "tests/kernels"),
    Fault("the last gradients are never applied", "schedules/unroll.py",
          "end if flush and not segment.is_cut_short else newest", "newest", "tests/schedules"),
    Fault("the first version of a phase is an older one", "schedules/phases.py",
          "is_handed_on = self.flush_at_end and step == self.end_step - 1", "is_handed_on = False", SCHEDULES),
    Fault("a sum keeps the gradients of an older step", "pipeline/gradients.py",
          "            self._buffers[slot].zero_()\n", "", LOOP),
    Fault("tensor-parallel ranks all report their loss", "pipeline/stage_compute.py",
          "if self._reports_loss:", "if True:", MESH),
    Fault("an embedding that is tied counts twice in the norm", "pipeline/stage_update.py",
          "is_second = self._tied is not None and", "is_second = False and", f"{MESH} -k tied"),
    Fault("a new version is not gathered", "pipeline/stage_update.py",
          "        self._data_parallel.gather(weights)\n        if self.balance is not None:\n"
          "            self.balance.absorb(step, version=step + 1)",
          "        if self.balance is not None:\n            self.balance.absorb(step, version=step + 1)", MESH),
    Fault("biases of experts come a version late", "pipeline/stage_update.py",
          "self.balance.absorb(step, version=step + 1)", "self.balance.absorb(step, version=step)",
          f"{MESH} -k hand_written"),
    Fault("the mean is over one token less", "pipeline/step_runner.py",
          "return clipped / max(result.tokens, 1)", "return clipped / max(result.tokens - 1, 1)", LOOP),
    Fault("gradients below the bound are scaled up", "pipeline/step_runner.py",
          "min(1.0, clip / max(result.grad_norm, 1e-30))", "clip / max(result.grad_norm, 1e-30)", LOOP),
    Fault("a failed reduction is summed all the same", "pipeline/step_runner.py",
          "                reduction.result()\n", "                pass\n", f"{EXECUTOR} -k failed_reduction"),
    Fault("the norm is not the mean's", "pipeline/step_stats.py",
          "numbers[_SQUARES] ** 0.5 / divisor,", "numbers[_SQUARES] ** 0.5,", LOOP),
    Fault("a loss that is not finite is told of nowhere", "pipeline/step_stats.py",
          "self.vector[first : first + len(sums) - 2] = ~sums[2:].isfinite()", "pass",
          "tests/pipeline/test_step_stats.py"),
    Fault("an evaluation spoils what a compensation still reads", "pipeline/evaluation.py",
          "keeps=self._keeps_slot", "keeps=False", "tests/parity/test_layouts.py -k evaluating"),
    # optimizers
    Fault("weight decay is left out", "optim/stage_optimizer.py",
          "update.add_(z, alpha=run.weight_decay)", "pass", RULES),
    Fault("published weights do not look ahead", "optim/stage_optimizer.py",
          "if lookahead_steps else z)", "if False else z)", LOOP),
    Fault("a skipped batch is counted", "optim/stage_optimizer.py",
          "        self.num_skipped += 1\n", "", "tests/pipeline/test_nonfinite.py -k skipped_batch"),
    Fault("Muon's scale is of the other side", "update_rules/kinds/muon.py",
          "scale = 0.2 * math.sqrt(max(grad.shape[-2:]))", "scale = 0.2 * math.sqrt(min(grad.shape[-2:]))", RULES),
    Fault("Adam's count is off by one", "update_rules/kinds/adamw.py",
          "torch.full((), count - 1.0, device=grad.device)", "torch.full((), float(count), device=grad.device)", RULES),
    Fault("copies count in the norm", "optim/sharded_reducer.py",
          "sum_of_squares(gradient[bucket.local_shard]) / bucket.copies",
          "sum_of_squares(gradient[bucket.local_shard])", MESH),
    Fault("warmup begins at zero", "optim/lr_schedule.py",
          "return (update + 1) / shape.warmup_steps", "return update / shape.warmup_steps",
          "tests/optim/test_lr_schedule.py"),
    # the model and how it lies over ranks
    Fault("a router's gradient is not summed over tensor ranks", "models/parameters.py",
          '"layers.*.mlp.router.weight", Role.ROUTER, None, 0, Gradient.PARTIAL',
          '"layers.*.mlp.router.weight", Role.ROUTER, None, 0, Gradient.WHOLE', MESH),
    Fault("norms of heads are taken for norms of layers", "models/parameters.py",
          '"layers.*.attention.query_norm.weight", Role.VECTOR, None, 0, Gradient.PARTIAL',
          '"layers.*.attention.query_norm.weight", Role.VECTOR, None, 0, Gradient.PER_SEQUENCE_PART', MESH),
    Fault("every expert-parallel rank draws the first experts", "models/initialize.py",
          "for mine, expert in enumerate(part[0]):", "for mine, expert in enumerate(range(len(part[0]))):", MESH),
    Fault("an expert drops its latest but one", "nn/token_dispatcher.py",
          "order_R = order_R[place_R < capacity]", "order_R = order_R[place_R <= capacity]",
          "tests/nn/test_routing.py"),
    Fault("rotary positions turn the other way", "nn/rope.py",
          "return (exact * cos_S1K + turned * sin_S1K)", "return (exact * cos_S1K - turned * sin_S1K)",
          "tests/nn/test_reference_model.py"),
    Fault("documents are one token off", "data/microbatches.py",
          'np.searchsorted(self._document_ends, places, side="right")',
          'np.searchsorted(self._document_ends, places, side="left")', "tests/nn/test_documents.py"),
    Fault("an epoch repeats the order of the one before", "data/microbatches.py",
          "seed=self._seed, epoch=int(number)", "seed=self._seed, epoch=0", "tests/data/test_microbatches.py"),
    # what survives
    Fault("a resume forgets how late it is", "checkpoint/restore.py",
          "stage.optimizer.num_updates = step - late", "stage.optimizer.num_updates = step", RESUME),
    Fault("a resume forgets the routers", "checkpoint/restore.py",
          "            stage.balance.write_version(stage.num_updates)\n", "            pass\n", RESUME),
    Fault("a changed checkpoint is taken for whole", "checkpoint/paths.py",
          'if checksum(path / name) != told["crc32"]:', "if False:",
          "tests/cli/test_damaged_checkpoints.py -k finds_a_changed_byte"),
    Fault("another tokenizer goes unnoticed", "data/identity.py",
          "return digest.hexdigest()\n\n\ndef _full_hash", 'return ""\n\n\ndef _full_hash',
          "tests/data/test_identity.py"),
    Fault("secrets are written down", "config/secrets.py",
          'text = text.replace(value, f"<{name}>")', "pass", "tests/cluster/test_launch_files.py"),
)  # fmt: skip
