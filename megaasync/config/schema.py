"""What was asked for: the whole configuration as frozen dataclasses. Field names are the keys that users type.

Keys that came later have a default, so that whole YAML files of users from before still do.
"""

from dataclasses import dataclass
from typing import Any, Literal

from megaasync.config.layout import Layout


class ConfigError(ValueError):
    """A wrong configuration; the message names key, value and remedy."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture-of-experts feed-forward layers.

    Attributes:
        num_experts: routed experts per layer.
        top_k: experts per token.
        ffn_hidden_size: inner width of one expert.
        num_shared_experts: experts that see every token, fused into one of that many times the width.
        first_dense_layers: layers at the bottom that stay dense.
        score_function: of the router's logits.
        normalize_top_k: the weights of a token's experts are made to sum to one.
        capacity_factor: an expert takes at most this many times its even share of a rank's microbatch, and drops the
            rest; null drops nothing.
        bias_update_rate: after each step, experts above the mean load get this much less bias for the choice, those
            below more (arXiv 2408.15664); 0 is off.
        sequence_balance_loss: coefficient of the balance loss within each sequence (arXiv 2412.19437); 0 is off.
        global_balance_loss: coefficient of the balance loss against the whole batch before (arXiv 2501.11873).
        z_loss: coefficient of the squared log of the softmax's denominator (arXiv 2202.08906).
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    num_shared_experts: int
    first_dense_layers: int
    score_function: Literal["softmax", "sigmoid"]
    normalize_top_k: bool
    capacity_factor: float | None
    bias_update_rate: float
    sequence_balance_loss: float
    global_balance_loss: float
    z_loss: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, dense or mixture of experts.

    Attributes:
        num_layers, hidden_size, num_heads, num_kv_heads, ffn_hidden_size: shape; the last is the dense layers'.
        vocab_size: rows of the embedding, at least the tokenizer's number of pieces.
        seq_length: tokens per sequence.
        tie_embeddings: the head uses the embedding's weights.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of RMSNorm.
        init_std: standard deviation of initial weights; output projections divide it by sqrt(2 num_layers).
        moe: null for a dense model.
        qk_norm: RMSNorm over each head of queries and keys before the rotary positions, as Qwen3 has it.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    ffn_hidden_size: int
    vocab_size: int
    seq_length: int
    tie_embeddings: bool
    rope_theta: float
    norm_eps: float
    init_std: float
    moe: MoeConfig | None
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class SgdConfig:
    """Stochastic gradient descent, for checks: u = lr (g + weight_decay z); `momentum` mu as Muon's, 0 for none."""

    name: Literal["sgd"]
    lr: float
    weight_decay: float
    momentum: float


@dataclass(frozen=True, slots=True)
class AdamWConfig:
    """AdamW (arXiv 1711.05101): decoupled weight decay."""

    name: Literal["adamw"]
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True, slots=True)
class MuonConfig:
    """Muon for matrices, AdamW for the rest, one lr for both through the 0.2 sqrt(max(rows, cols)) scale.

    Attributes:
        momentum: mu of the moving average, Nesterov form.
        newton_schulz_steps: iterations of the orthogonalisation.
        newton_schulz_precision: of its products; `auto` is bfloat16 on GPUs, unless the run is in float64.
        betas, eps: of AdamW for embeddings, head, router and norms.
    """

    name: Literal["muon"]
    lr: float
    weight_decay: float
    momentum: float
    newton_schulz_steps: int
    newton_schulz_precision: Literal["auto", "float32", "bfloat16"]
    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True, slots=True)
class NAdamConfig:
    """NAdam: AdamW with a momentum that looks ahead; `momentum_decay` as torch's, 0.004 there."""

    name: Literal["nadam"]
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    momentum_decay: float


@dataclass(frozen=True, slots=True)
class LionConfig:
    """Lion (arXiv 2302.06675): wants an lr 3 to 10 times smaller than AdamW's and as much more decay."""

    name: Literal["lion"]
    lr: float
    weight_decay: float
    betas: tuple[float, float]


@dataclass(frozen=True, slots=True)
class AdanConfig:
    """Adan (arXiv 2208.06677) with decoupled decay."""

    name: Literal["adan"]
    lr: float
    weight_decay: float
    betas: tuple[float, float, float]
    eps: float


@dataclass(frozen=True, slots=True)
class NorMuonConfig:
    """NorMuon (arXiv 2510.05491) for matrices, AdamW for the rest.

    Attributes:
        momentum, newton_schulz_steps, newton_schulz_precision: as muon's.
        beta2: of the second moment of the rows.
        betas, eps: of AdamW; eps also of the rows.
    """

    name: Literal["normuon"]
    lr: float
    weight_decay: float
    momentum: float
    newton_schulz_steps: int
    newton_schulz_precision: Literal["auto", "float32", "bfloat16"]
    beta2: float
    betas: tuple[float, float]
    eps: float


@dataclass(frozen=True, slots=True)
class MarsConfig:
    """MARS-AdamW (arXiv 2411.10438) for matrices, AdamW for the rest.

    Attributes:
        betas: of the corrected gradient.
        gamma: strength of the correction by the gradient before.
        adamw_betas: of AdamW for embeddings, head, router and norms.
    """

    name: Literal["mars"]
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    gamma: float
    adamw_betas: tuple[float, float]
    eps: float


@dataclass(frozen=True, slots=True)
class SoapConfig:
    """SOAP (arXiv 2409.11321) for matrices, AdamW for the rest.

    Attributes:
        betas: of the moments in the eigenbasis; the second one also of the preconditioner.
        refresh_interval: updates between steps of the eigenbases.
        first_basis: gradients that are gathered, without an update, before the first eigenbasis.
        largest_side: rows or columns above which a side keeps its own axes.
        adamw_betas: of AdamW for embeddings, head, router and norms.
    """

    name: Literal["soap"]
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    refresh_interval: int
    first_basis: int
    largest_side: int
    adamw_betas: tuple[float, float]
    eps: float


@dataclass(frozen=True, slots=True)
class TorchOptimizerConfig:
    """Any `torch.optim.Optimizer`, delayed and corrected like ours.

    Attributes:
        target: importable name of the class, as torch.optim.RMSprop.
        arguments: of its construction, without lr and weight_decay.
        elementwise: it steps every parameter; otherwise hidden and expert matrices, each whole, and AdamW the rest.
        betas, eps: of that AdamW.
    """

    name: Literal["torch"]
    target: str
    arguments: dict[str, Any]
    elementwise: bool
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float


OptimizerConfig = (
    SgdConfig
    | AdamWConfig
    | NAdamConfig
    | LionConfig
    | AdanConfig
    | MuonConfig
    | NorMuonConfig
    | MarsConfig
    | SoapConfig
    | TorchOptimizerConfig
)


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """Pipeline schedule by name; see `megaasync.schedules.SCHEDULES`.

    Attributes:
        sync_start_steps, sync_cooldown_steps: steps at the start and the end that run without delay, under the
            synchronous schedule of the same placement.
        extra_in_flight: rounds of forwards ahead beyond the minimum; 1 hides the latency of a hop between stages.
        overlap_step: reduction, norm and optimizer step run beside forwards and backwards; false exposes them.
        delay: of each stage, in place of the schedule's own, for studies on one rank: 2bw with one stage, or
            interleaved_2bw with parallel.virtual_stages of them; null for the schedule's own.
    """

    name: Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "2bw", "interleaved_2bw", "pipedream", "wpipe"]
    sync_start_steps: int
    sync_cooldown_steps: int
    extra_in_flight: int
    overlap_step: bool
    delay: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class NoCorrection:
    """Nothing is done against the delay."""

    name: Literal["none"]


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """Forward and backward run at weights that look as many updates ahead as are missing: z - d u."""

    name: Literal["error_feedback"]


@dataclass(frozen=True, slots=True)
class Taylor:
    """DC-ASGD (arXiv 1609.08326): g + strength g g (w_now - w_then) after clipping.

    Attributes:
        strength: lambda.
        adaptive: divide it by the root of g's mean square.
    """

    name: Literal["taylor"]
    strength: float
    adaptive: bool


CorrectionConfig = NoCorrection | ErrorFeedback | Taylor


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Degrees of parallelism; their product is the number of ranks.

    Attributes:
        data: a number, or `auto` for what the launched ranks leave (1 when started bare).
        expert: ranks over which experts are spread; they hold different sequences, as those of `data` do.
        sequence_parallel: between layers, tensor-parallel ranks hold a part of the sequence each.
        virtual_stages: stages per pipeline rank; null takes what the schedule needs: 2 for interleaved ones, zbv and
            wpipe, else 1.
        layers_per_stage: layers of each stage, in the order of the model; null deals them so that the most expensive
            stage, embedding and head included, is as cheap as it can be.
        timeout_seconds: longest wait for another rank's message; then the run ends and says who was waited for.
    """

    tensor: int
    expert: int
    pipeline: int
    data: int | Literal["auto"]
    sequence_parallel: bool
    virtual_stages: int | None
    layers_per_stage: tuple[int, ...] | None
    timeout_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """The training loop (group `train`).

    Attributes:
        steps: optimizer steps.
        global_batch_size, micro_batch_size: sequences.
        seed: of weights and data order.
        dtype: of weights and activations in compute; master weights are at least float32.
        clip_grad_norm: largest global gradient norm; null switches clipping off.
        eval_interval: steps between evaluations; null evaluates only at the end.
        eval_sequences: sequences of the validation set that an evaluation uses; null is all.
        lr_schedule: shape of the learning rate over the steps.
        lr_schedule_steps: steps that cosine and wsd run over, after which the lr stays; null takes steps.
        warmup_steps: linear warmup.
        final_lr_ratio: lr at the last step over the peak, for cosine and wsd.
        decay_steps: length of the final decay of wsd.
        on_nonfinite: what to do about a batch whose loss or gradient norm is not finite: `stop`, or `skip` it.
        max_skipped: with `skip`, how many in all; the next one stops.
        time_limit: seconds after which the run saves and ends, as at a signal; null for none.
        recompute: activations that the backward makes again instead of keeping them: `none`; `selective`, all but
            matrix products; `full`, all of a layer but its input.
        loss_chunk_tokens: tokens whose logits are held at once; null holds those of a whole microbatch.
        document_mask: tokens attend within their own document only, and not over the whole sequence.
        fp8: recipe of the layers' matrix products, with kernels=te: `current` scales by each tensor, `block` and
            `mxfp8` by blocks of it; `none` computes in dtype.
    """

    steps: int
    global_batch_size: int
    micro_batch_size: int
    seed: int
    dtype: Literal["float64", "float32", "bfloat16"]
    clip_grad_norm: float | None
    eval_interval: int | None
    eval_sequences: int | None
    lr_schedule: Literal["constant", "cosine", "wsd"]
    lr_schedule_steps: int | None = None
    warmup_steps: int
    final_lr_ratio: float
    decay_steps: int
    on_nonfinite: Literal["stop", "skip"]
    max_skipped: int
    time_limit: float | None
    recompute: Literal["none", "selective", "full"]
    loss_chunk_tokens: int | None
    document_mask: bool
    fp8: Literal["none", "current", "block", "mxfp8"]


@dataclass(frozen=True, slots=True)
class PythonStdlibData:
    """The Python standard library's own source text, split into train and validation by file.

    Attributes:
        cache_dir: where tokenizer and indexed token files are kept.
        validation_fraction: share of documents held out.
        tokenizer_bytes: most text that the tokenizer is trained on, sampled evenly over all of it.
    """

    name: Literal["python_stdlib"]
    cache_dir: str
    validation_fraction: float
    tokenizer_bytes: int = 32_000_000


@dataclass(frozen=True, slots=True)
class SyntheticData:
    """Tokens of a seeded random Markov chain: learnable, made without a file.

    Attributes:
        num_tokens: length of the training stream; the validation stream has a tenth of it.
        branching: successors of each token.
    """

    name: Literal["synthetic"]
    num_tokens: int
    branching: int


@dataclass(frozen=True, slots=True)
class IndexedData:
    """Token files in Megatron's MMIDIDX layout.

    Attributes:
        path: prefix of the training files: `path`.bin and `path`.idx.
        validation_path: prefix of the validation files; null for no validation.
    """

    name: Literal["indexed"]
    path: str
    validation_path: str | None


@dataclass(frozen=True, slots=True)
class HfData:
    """Local text, jsonl, json or parquet files, or a dataset on the Hugging Face hub.

    Attributes:
        path: a file, a folder, a glob (`**` is recursive), or the name of a dataset on the hub.
        split: split to read.
        text_field: column with the text.
        tokenizer: a sentencepiece model file; null trains one on this data.
        cache_dir: where tokenizer and indexed token files are kept.
        validation_fraction: share of documents held out.
        tokenizer_bytes: most text that a tokenizer is trained on, sampled evenly over all files and documents.
        on_bad_bytes: what to do about a text file that is not UTF-8.
    """

    name: Literal["hf"]
    path: str
    split: str
    text_field: str
    tokenizer: str | None
    cache_dir: str
    validation_fraction: float
    on_bad_bytes: Literal["stop", "replace"]
    tokenizer_bytes: int = 32_000_000


@dataclass(frozen=True, slots=True)
class WandbConfig:
    """Weights & Biases tracking; `project` and `run_name` as there, `run_name` null takes the folder's."""

    mode: Literal["disabled", "offline", "online"]
    project: str
    run_name: str | None


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Checkpoints below run.dir/checkpoints.

    Attributes:
        interval: steps between them; there is one at the end and one at a stop too. null makes none.
        keep: newest ones that are kept.
        resume: `auto` goes on from the newest complete one in run.dir, if there is one; `never`; or a checkpoint's
            folder, which then wins.
        async_save: write beside the training; the pipeline waits for one copy of the state only.
        override: resume although the lr or another setting of the training is not the checkpoint's.
    """

    interval: int | None
    keep: int
    resume: str
    async_save: bool
    override: bool


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """What is written down.

    Attributes:
        interval: steps between progress lines; metrics.jsonl has every step.
        trace: write the measured timeline as trace.json.
        spike_threshold: robust standard deviations of the last 100 losses above their median that make a spike, which
            is written and told of; null for none.
    """

    interval: int
    trace: bool
    spike_threshold: float | None
    wandb: WandbConfig


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Where the run is, and how often it is begun again.

    Attributes:
        dir: the run folder; null makes a new one under runs/.
        max_restarts: times that ranks started on this host are started again, from the last checkpoint, when one dies,
            hangs or breaks; not when training itself fails. Under torchrun that is its own --max-restarts.
    """

    dir: str | None
    max_restarts: int


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """This host.

    Attributes:
        nodes, gpus_per_node: what a plan and `parallel.data=auto` count with; null for this host as it is started.
        gpu_memory_gib: of one GPU; a plan warns of what does not fit. null for unknown.
        gpu_tflops: what one GPU reaches in matrix products, for a plan's times; null for no times.
        network_gbytes: per second that one GPU sends to another node.
    """

    name: Literal["local"]
    nodes: int
    gpus_per_node: int | None
    gpu_memory_gib: float | None
    gpu_tflops: float | None
    network_gbytes: float | None

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks on each node; None for as many as the layout needs."""
        return self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCluster:
    """A SLURM cluster; `python -m megaasync.launch` writes and submits the job.

    Attributes:
        nodes, gpus_per_node, gpu_memory_gib, gpu_tflops, network_gbytes: as of `local`; without GPUs null.
        tasks_per_node: ranks on each node; null takes gpus_per_node.
        gpus_per_task: one GPU bound to each rank, in the place of gpus_per_node's for the node.
        cpus_per_task: cores of each rank; null leaves that to the cluster.
        partition, account, qos, constraint, exclude, reservation, mem, gres, comment, mail_type, mail_user, dependency,
            nice, wckey: as sbatch's; null leaves them out. A gres with GPUs takes the place of gpus_per_node's request.
        job_name: null takes the run folder's.
        exclusive: whole nodes.
        time: in any form that sbatch takes, as 90 (minutes), 24:00:00 or 2-12 (days-hours); null is the partition's.
        signal_seconds: before the time limit, when the ranks are told to save and the job is queued again.
        requeue: queue the job again at its time limit and when a node fails; it goes on from its last checkpoint.
        container_image: an image to run in; null for none.
        container_runtime: `pyxis` (srun --container-image) or `apptainer`.
        mounts: of the container, as host:container; the working folder and the run folder are added.
        env: environment variables, set as they are. Secrets among them move to `secrets`.
        secrets: names of variables that the job takes from the environment that it is submitted from.
        modules: of `module load`, before setup.
        setup: lines of shell before the job's steps.
        extra_sbatch: further options of sbatch, as --gres=gpu:h200:8.
        python: command that runs Python; null takes the launcher's own, or `python` in a container.
        submit: false only writes the job.
        check_files: look for tokens, tokenizer and checkpoint on this host before submitting.
        preflight: look at all nodes before the first step.
    """

    name: Literal["slurm"]
    nodes: int
    gpus_per_node: int | None
    gpu_memory_gib: float | None
    gpu_tflops: float | None
    network_gbytes: float | None
    tasks_per_node: int | None
    gpus_per_task: int | None = None
    cpus_per_task: int | None
    job_name: str | None = None
    mem: str | None = None
    gres: str | None = None
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    exclude: str | None
    reservation: str | None
    time: str | None
    comment: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    dependency: str | None = None
    exclusive: bool = False
    nice: int | None = None
    wckey: str | None = None
    signal_seconds: int
    requeue: bool
    container_image: str | None
    container_runtime: Literal["pyxis", "apptainer"]
    mounts: tuple[str, ...]
    env: dict[str, str]
    secrets: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...]
    extra_sbatch: tuple[str, ...]
    python: str | None
    submit: bool
    check_files: bool = True
    preflight: bool

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks on each node; None for as many as the layout needs."""
        return self.tasks_per_node or self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerCluster:
    """Containers on this host; `python -m megaasync.launch` writes and starts one.

    Attributes:
        nodes, gpus_per_node, gpu_memory_gib, gpu_tflops, network_gbytes: as of `local`; nodes must be 1.
        container_image: image to run, as `docker build -t` named it.
        mounts: as host:container; the working folder and the run folder are added.
        env: environment variables, set as they are. Secrets among them move to `secrets`.
        secrets: names of variables that the container takes from the environment that it is started from.
        submit: false only writes the command.
        check_files: look for tokens, tokenizer and checkpoint on this host before the start.
    """

    name: Literal["docker"]
    nodes: int
    gpus_per_node: int | None
    gpu_memory_gib: float | None
    gpu_tflops: float | None
    network_gbytes: float | None
    container_image: str
    mounts: tuple[str, ...]
    env: dict[str, str]
    secrets: tuple[str, ...] = ()
    submit: bool
    check_files: bool = True

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks on each node; None for as many as the layout needs."""
        return self.gpus_per_node


ClusterConfig = LocalCluster | SlurmCluster | DockerCluster


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration of a run.

    Attributes:
        kernels: what layers are computed with: `torch`, `te` for NVIDIA's Transformer Engine, or `auto`, which takes
            the latter for bfloat16 on a GPU where it is installed.
    """

    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    correction: CorrectionConfig
    parallel: ParallelConfig
    train: TrainingConfig
    data: PythonStdlibData | SyntheticData | IndexedData | HfData
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    cluster: ClusterConfig
    run: RunConfig
    kernels: Literal["auto", "torch", "te"]
    device: Literal["auto", "cpu", "cuda"]
    debug: bool
    dry_run: bool

    @property
    def layout(self) -> Layout:
        """The mesh of ranks; `auto` counts as 1 until it is resolved."""
        parallel = self.parallel
        data = 1 if parallel.data == "auto" else parallel.data
        return Layout(parallel.pipeline, data, parallel.expert, parallel.tensor)

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step, m."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.data_ranks)

    @property
    def data_ranks(self) -> int:
        """Ranks that hold different sequences: data x expert."""
        return self.layout.size(("data", "expert"))

    @property
    def world_size(self) -> int:
        """Ranks that the layout needs."""
        return self.layout.world_size
