"""Old names, each replaced by the field's word, are used nowhere; nor are phrases at which a reader stops."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("megaasync", "tools", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

# classes, functions, parameters, attributes and variables, wherever they stand
EVERYWHERE = {
    "TrainConfig": "Config",
    "LoopConfig": "TrainingConfig",
    "Layout": "ParallelDims",
    "FlatLayout": "FlatParamLayout",
    "parts_of": "iter_chunks",
    "owned_start": "shard_offset",
    "owned_size": "shard_size",
    "view_owned": "view_shard",
    "copy_owned": "gather_shard",
    "spread_owned": "scatter_shard",
    "Homes": "MatrixOwners",
    "homes": "owners",
    "bring_home": "gather_to_owner",
    "send_back": "scatter_from_owner",
    "DataParallel": "ShardedReducer",
    "deal_layers": "partition_layers",
    "_deal": "assign_balanced",
    "Updates": "StepRunner",
    "hand_in": "submit_gradient",
    "bring_back": "restore_pending",
    "_conclude": "_finalize",
    "_couple": "all_reduce_stats",
    "under_way": "in_flight",
    "looks_ahead": "error_feedback",
    "steps_ahead": "lookahead_steps",
    "publish_master": "load_master_into_slot",
    "put_back": "restore_slot",
    "leave_out": "skip",
    "settle": "flush",
    "settles": "flush_at_end",
    "heeded": "acknowledged",
    "TIE": "is_tied",
    "NORM": "REDUCE_GRAD",
    "RESULT": "SYNC",
    "with_hand_in": "append_reduce",
    "merge_flushed": "one_f_one_b_order",
    "looped": "round_robin_schedule",
    "merge_unending": "steady_one_f_one_b_order",
    "holdings": "buffer_counts",
    "Holdings": "BufferCounts",
    "StageNeeds": "StageBuffers",
    "needs_of": "buffers_required",
    "ScheduleReport": "ScheduleMetrics",
    "posted_ahead": "prefetch_recvs",
    "ActionBoard": "HeartbeatFile",
    "ActionNotes": "Heartbeat",
    "Watch": "HangDetector",
    "gathered": "all_gather_object",
    "meeting_place": "rendezvous_endpoint",
    "CheckpointKeeper": "AsyncCheckpointWriter",
    "RunCheckpoints": "CheckpointManager",
    "Pieces": "TensorChunks",
    "Entries": "ShardedStateDict",
    "boxes": "chunks",
    "look_at": "inspect_checkpoint",
    "where_to_go_on": "find_resume_point",
    "wish": "requested",
    "is_to_go_on": "requeue",
    "to_go_on": "requeue",
    "may_go_well": "retryable",
    "is_fault": "is_retryable",
    "is_vague": "unknown_cause",
    "say": "notify",
    "Say": "Notify",
    "instead_of": "recompute_in_backward",
    "_Recipe": "RecomputeHandle",
    "KEEP_ALL": "NO_RECOMPUTE",
    "Computation": "LayerContext",
    "PLAIN": "DEFAULT_CONTEXT",
    "computing": "autocast",
    "row_counts": "tokens_per_expert",
    "deliver": "accumulate_or_defer",
    "use_queue": "attach_queue",
    "Deferred": "DeferredWgrads",
    "times_gate": "gate_proj",
    "times_up": "up_proj",
    "times_down": "down_proj",
    "Splits": "ModelParallelGroups",
    "NO_SPLITS": "NO_MODEL_PARALLEL",
    "Facts": "NodeReport",
    "Needs": "Requirements",
    "_odd_ones": "mismatched_hosts",
    "also_slow": "slow_params",
    "Claim": "ClaimedFolder",
    "publish": "write_version, or out for a tensor that is written to",
    "dealt": "assigned",
    "rules_of": "OptimizerConfig.rules",
}

PHRASES = (
    "A laptop plans",
    "compares contents by hash",
    "below it stands what may be concluded",
    "sees whole matrices",
    "microbatches by address",
    "from shapes alone",
    "Started bare",
    "METHOD of the project",
    "a review noticed",
    "a fresh last stage",
    "goes on exactly",
    "handed on",
    "The house",
    "| room |",
    "comes next",
    "Quiesce and settle",
    "handed in",
    "heeded",
    "named by the layer that knows how",
    "watched, not asked",
    "is handed in and never waited for",
)


def identifiers(tree):
    """(line, name) of every name that the code defines or uses; text is not looked at."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg | ast.keyword) and node.arg is not None:
            yield node.lineno if hasattr(node, "lineno") else 0, node.arg
        elif isinstance(node, ast.alias):
            yield 0, node.asname or node.name


def test_names_of_before_are_gone():
    found = []
    for path in SOURCES:
        for line, name in identifiers(ast.parse(path.read_text())):
            if name in EVERYWHERE:
                found.append(f"{path.relative_to(ROOT)}:{line}: {name} is {EVERYWHERE[name]} now")
    assert found == []


def loop_variables(tree):
    """(line, name) of every variable that a loop, a comprehension or a lambda introduces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension):
            yield from ((name.lineno, name.id) for name in ast.walk(node.target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.Lambda):
            yield from ((argument.lineno, argument.arg) for argument in node.args.args)


def test_loop_variables_have_the_name_of_what_they_are():
    found = []
    for path in SOURCES:
        for line, name in loop_variables(ast.parse(path.read_text())):
            if name == "one":
                found.append(f"{path.relative_to(ROOT)}:{line}: call it what it is")
    assert found == []
    assert sorted(n for _, n in loop_variables(ast.parse("for a, b in c:\n    [d for d in e]\nlambda f: g"))) == list(
        "abdf"
    )


def test_the_walk_sees_every_kind_of_name():
    code = "class Layout:\n    def settle(self, wish, *, say=None):\n        self.homes = Watch(heeded=1)\n"
    assert {name for _, name in identifiers(ast.parse(code))} >= {
        "Layout",
        "settle",
        "wish",
        "say",
        "homes",
        "Watch",
        "heeded",
    }


def test_pages_have_no_phrases_of_before():
    texts = {page.name: page.read_text() for page in PAGES}
    found = [(name, phrase) for name, text in texts.items() for phrase in PHRASES if phrase in text]
    assert found == []
