"""The sections of a run's TOML that are ours. TorchTitan's keep its names and are its own dataclasses
(trainer/titan_config.py)."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from titan_rl.config.sections.hosts import HostsConfig
from titan_rl.config.sections.kinds import (
    Count,
    Files,
    Gib,
    LearningRate,
    Penalty,
    Quantization,
    Repetition,
    Seconds,
    Share,
    Style,
    Temperature,
    Weight,
    Whole,
)
from titan_rl.config.sections.placement import PlacementConfig
from titan_rl.config.sections.precision import uses_fp8
from titan_rl.config.sections.role_sections import (
    ChatTemplateConfig,
    CriticConfig,
    DrafterConfig,
    ImagesConfig,
    ImplicitRewardConfig,
    LoraConfig,
    ReferenceConfig,
    RewardModelConfig,
    TeacherConfig,
)
from titan_rl.config.sections.suites import PRESETS

TITAN_SECTIONS = (
    "training",
    "parallelism",
    "optimizer",
    "lr_scheduler",
    "compile",
    "float8",
    "activation_checkpoint",
    "comm",
    "debug",
)


@dataclass(kw_only=True)
class RunConfig:
    dir: str = ""
    """Run directory; empty: ``runs/<file>-<date>-<time>``."""
    seed: Whole = 1
    """All randomness derives from it, by name."""
    plugin_path: list[str] = field(default_factory=list)
    """Folders where ``pkg.module:name`` and data files are looked for; empty: the TOML's folder and the current one."""


MADE_MODELS = ("tiny", "tiny-vision")
"""Values of ``model.path`` whose model a run makes itself (models/builtin/made.py)."""


@dataclass(kw_only=True)
class ModelConfig:
    path: str = "tiny"
    """A Hugging Face directory, looked for in the current folder and in those of run.plugin_path, or a name of the Hub;
    ``tiny``: a small Llama with a character tokenizer, made in the run directory; ``tiny-vision``: one that sees."""
    kernel: Literal["auto", "triton", "reference"] = "auto"
    """What computes log-probabilities; ``auto``: Triton where the trainer has a GPU, else the reference in torch."""
    family: str = ""
    """``pkg.module:name`` of a family of your own (models/families/registry.py); empty: by config.json's type."""
    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    """What writes out messages, wherever the run does."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """How large images are shown."""


TASKS_OF_FILES = ("jsonl", "code", "math", "search", "swe", "nemo_gym", *PRESETS)
"""Tasks whose prompts are rows of ``task.options.file``."""
FILE_OPTIONS = ("file", "held_out_file", "corpus")
"""Keys of their ``task.options`` that name files."""
OWN_SCORE = "task"
"""The task's own score, among ``task.rewards``, as ``task.reward`` and as ``eval.grader``."""
JUDGE = "judge"
"""A language model's, among ``task.rewards``, as ``task.reward`` and as ``eval.grader``."""
ANSWER_REWARDS = ("gsm8k", "gsm8k_flexible", "math")
"""Rewards by the expected answer, by name (environments/rewards/answer_graders.py)."""
MADE = "task"
"""``data.file`` that is no file: rows are made of ``[task]``."""
BUILT_IN_TASKS = ("calculator", "treasure", "alphabet_sort", "reverse_text", "wordle", "shapes")
"""Tasks whose prompts are generated here without end."""
MIXTURE = "mixture"
"""The name of several tasks as one (config/mixture.py)."""
TASKS_OF_OTHERS = ("openenv", "nemo_gym", "gymnasium", "verifiers")
"""Tasks that are played in environments of other people's."""


@dataclass(kw_only=True)
class TaskConfig:
    name: str = "gcd"
    """What ``titan-rl tasks`` lists (``calculator``, ``treasure``, ``alphabet_sort``, ``wordle``, ``shapes``, ..., or
    a reasoning-gym family), ``jsonl``, ``code``, ``math``, ``search`` or ``swe`` for a data file, a public set
    (``gsm8k``, ``math500``, ``aime``, ``mmlu_pro``, ``ifeval``, ``humaneval``, ``mbpp``) for its rows, ``openenv``,
    ``nemo_gym``, ``verifiers`` or ``gymnasium`` for other people's environments, ``mixture`` for several tasks, or
    ``pkg.module:name``."""
    style: Style = "compact"
    """``compact``: the prompt as it is, for tiny character models; ``chat``: through the model's chat template."""
    system_prompt: str = ""
    """What a chat begins with."""
    reward: str = ""
    """``pkg.module:name`` of a function ``(prompt, completion, row) -> float | dict``; ``gsm8k``, ``gsm8k_flexible`` or
    ``math``, by the expected answer; ``judge``, a language model that ``[task.judge]`` tells of; ``task`` or empty: the
    task's own score."""
    rewards: dict[str, Weight] = field(default_factory=dict)
    """Several of these by their weights: the reward is the weighted sum."""
    rewards_by_source: dict[str, str] = field(default_factory=dict)
    """Rewards of rows by the set that they are of (``data_source``, ``task_name`` or ``dataset``): its name to one of
    these."""
    judge: dict[str, Any] = field(default_factory=dict)
    """The judge's own keys."""
    keep_special: bool = False
    """Whether rewards, tools and environments see the special tokens that the model wrote, but for the end of its
    answer: for models whose thinking, channels or calls stand between special tokens."""
    sandbox: dict[str, Any] = field(default_factory=dict)
    """Where programs that a model wrote run (environments/sandbox/remote.py): a server's ``url``, ``token_env``,
    ``patience`` and ``at_once``; empty: in boxes on the verifiers' machines."""
    scoring: Literal["auto", "exact", "family"] = "auto"
    """Of a reasoning-gym family: by its own scorer, which may pay in part for wrong answers, or for right answers
    alone; auto: exact where an answer that never changes would earn too much (``titan-rl tasks`` tells which)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the task itself: a family's ``max_value``, a data file's ``file``."""

    @property
    def scores_itself(self) -> bool:
        """Whether its own score is in the reward."""
        return OWN_SCORE in self.reward_names

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Everything that scores, by name."""
        several = (*self.rewards, *self.rewards_by_source.values())
        return several or (self.reward or OWN_SCORE,)


@dataclass(kw_only=True)
class AlgorithmConfig:
    name: str = "grpo"
    """A registered algorithm (algorithms/registry.py), or ``pkg.module:name`` of your own."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over the step's tokens; over its rollouts of each one's mean; or over rollouts x max_new_tokens (Dr.GRPO),
    the longest single answer."""
    updates_per_batch: Count = 1
    """Optimizer steps that a batch is split into."""
    train_truncated: bool = True
    """Whether samples that ran out of tokens or turns are trained on, with the reward that they got; the others of
    their group are compared with them either way (false: DAPO's overlong filtering)."""
    overlong_buffer: Whole = 0
    """Tokens before rollout.max_new_tokens in which an answer costs more the longer it is (DAPO); 0: none do."""
    overlong_penalty: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """What an answer that ends with the last of them costs, or one that was cut short."""
    routing: Literal["own", "replay"] = "own"
    """Which experts tokens go through in the policy's trainer: those of its own routers, or the ones that they went
    through when they were sampled (R3)."""
    options: dict[str, Any] = field(default_factory=dict)
    """The algorithm's own keys. A TOML writes them beside the ones above; the algorithm's dataclass checks them."""


@dataclass(kw_only=True)
class RolloutConfig:
    prompts_per_step: Count = 16
    """Groups that make up a batch."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Samples of each prompt."""
    max_new_tokens: Count = 16
    """Longest answer, end of sequence included."""
    max_turns: Count = 32
    """Answers of an episode; one that would have more ends there, with the status of that name, and is scored."""
    temperature: Temperature = 1.0
    """Sampling temperature, from 0.01 to 2, which are vLLM's limits; the trainer uses the same."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the fewest tokens that have this probability together. Of this and the next two, the tokens that were
    left travel with each answer, and the trainer renormalizes over the same ones."""
    top_k: Whole = 0
    """Sample from so many of the likeliest tokens; 0: from all."""
    min_p: Share = 0.0
    """Sample from tokens at least this share as likely as the likeliest one."""
    repetition_penalty: Repetition = 1.0
    """Divide a logit above 0 by it, and multiply another, where prompt or answer has the word; 1: none. Of this and the
    next two, the trainer penalizes its logits by the same words."""
    presence_penalty: Penalty = 0.0
    """Subtract it from the logits of words that the answer has."""
    frequency_penalty: Penalty = 0.0
    """Subtract it from their logits as often as the answer has them."""
    thinking_budget: Whole = 0
    """Most tokens between ``<think>`` and ``</think>``, after which thinking is closed and the answer goes on; what was
    forced is not trained; 0: no limit."""
    stop: list[Annotated[str, Field(min_length=1)]] = field(default_factory=list)
    """Texts after which an answer ends, in training and evaluation; they stay its last part."""
    max_staleness: Whole = 0
    """How many policy versions a sample may lag behind the weights it trains; 0 is on-policy and synchronous."""
    share_prefix: bool = True
    """Run a group's prompt through the trainer once instead of once a sample."""
    max_retries: Whole = 2
    """Retries of a group after infrastructure failures, before it is discarded by name. After this many engine deaths
    (the last one while running alone) a prompt is discarded as ``poison``."""


@dataclass(kw_only=True)
class FilterConfig:
    """Groups that do not enter a batch although they could; others are sampled in their place."""

    no_signal: bool = False
    """Exclude groups whose rewards are all equal (DAPO's dynamic sampling)."""
    min_pass_rate: Share = 0.0
    """Lower bound on a prompt's pass rate."""
    max_pass_rate: Share = 1.0
    """Upper bound on a prompt's pass rate."""
    all_truncated: bool = False
    """Exclude groups whose samples all ran out of tokens or turns."""
    max_refills: Whole = 4
    """Batches' worth of groups that may be sampled besides, for one batch; then the batch is smaller."""

    @property
    def is_on(self) -> bool:
        return self.no_signal or self.all_truncated or self.min_pass_rate > 0 or self.max_pass_rate < 1


@dataclass(kw_only=True)
class CurriculumConfig:
    """Prompts that are always or never solved are drawn less (environments/prompts/curriculum.py)."""

    least_chance: Annotated[float, Field(ge=0.01, le=1)] = 1.0
    """Minimum sampling probability of any prompt; 1 disables the curriculum."""
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Weight of earlier steps in a pass rate, against the newest step; 0: only the newest counts."""

    @property
    def is_on(self) -> bool:
        return self.least_chance < 1


@dataclass(kw_only=True)
class SpeculativeConfig:
    """``[generator.speculative]``: tokens that are drafted and checked in one pass of the model, which leaves the
    distribution of answers as it is."""

    method: Literal["none", "ngram", "draft_model", "eagle3", "mtp"] = "none"
    """``ngram``: what stood behind the last few tokens where they occurred before, in the prompt or the answer.
    ``draft_model``: what a smaller model samples. ``eagle3``: what a head samples that reads the policy's hidden
    states. ``mtp``: what the policy's own layer for multi-token prediction samples."""
    model: str = ""
    """Hugging Face directory of a draft model, or head, that does not learn; one that learns is ``drafter.path``."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=16)] = 3
    """Drafted at most, for each request in each step."""
    prompt_lookup_min: Annotated[int, Field(ge=1, le=64)] = 2
    """The fewest last tokens that are looked for."""
    prompt_lookup_max: Annotated[int, Field(ge=1, le=64)] = 4
    """The most."""
    adaptive: bool = True
    """Drafts are left out at sizes of batches at which an engine measures that they cost time. Which samples are drawn
    then depends on the machine's speed."""

    @property
    def has_model(self) -> bool:
        """Whether a model, or a head, of another directory drafts."""
        return self.method in ("draft_model", "eagle3")


@dataclass(kw_only=True)
class GeneratorConfig:
    replicas: Count = 1
    """vLLM engines."""
    tensor_parallel: Count = 1
    """Ranks of one engine, each a process."""
    update: Literal["in_flight", "drain"] = "in_flight"
    """New weights are applied between two engine steps; ``drain`` first lets running requests end."""
    kv: Literal["keep", "recompute"] = "keep"
    """What requests that run through an update go on with: the KV that they have, or KV made by the new weights."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    quantization: Quantization = "none"
    """Linear layers of the transformer's blocks multiply in FP8 (E4M3), by vLLM's names: a scale for each weight, for
    each output channel, or for each block of 128 x 128; inputs are rounded as they come."""
    max_num_seqs: Count = 128
    """Requests that one engine runs at once, at most."""
    adaptive_max_num_seqs: bool = False
    """Requests wait while the KV cache is expected to become too full for them, so that fewer are preempted."""
    kv_cache_gib: Gib = 0.0
    """KV cache of each rank of an engine; 0: half a GiB on a CPU, on a GPU what the placement leaves."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Share of a GPU's memory that all of the run's processes on it may take together."""
    torch_compile: bool = True
    """vLLM compiles the model for a GPU, which takes a minute where nothing is cached. Without, its own kernels run, in
    CUDA graphs where a step only decodes. A CPU's engines are never compiled."""
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    """Speculative decoding."""

    @property
    def is_quantized(self) -> bool:
        return self.quantization != "none"


@dataclass(kw_only=True)
class VerifierConfig:
    procs: Count = 1
    """Processes that drive episodes; each has scoring processes of its own."""
    score_timeout: Seconds = 5.0
    """Seconds that one answer may take to score; then its scorer is killed and the rollout is a ``timeout``."""
    scoring_workers: Count = 256
    """Answers that a verifier has scored side by side, at most: as many as there are cores compute, the others wait for
    servers. Each is scored by a fork of the scoring process."""
    step_timeout: Seconds = 60.0
    """Seconds that an environment may take for a reply; then the rollout is a ``timeout``."""
    episode_timeout: Seconds = 300.0
    """Seconds that a whole group may take, from its begin or its engine's death on."""


@dataclass(kw_only=True)
class SFTConfig:
    steps: Whole = 0
    """Supervised steps on worked examples before reinforcement learning."""
    examples_per_step: Count = 64
    lr: LearningRate = 1e-3
    """Learning rate of these steps, which have an optimizer of their own."""


@dataclass(kw_only=True)
class DataConfig:
    """Of a run that is trained on data instead of rollouts: without generator and verifier (``algorithm.name = "sft"``,
    ``dpo``, ``kto`` or ``reward_model``)."""

    file: Files = ""
    """JSON lines or Parquet: a path, a glob, a ``datasets`` directory or a name of the Hub
    (``openai/gsm8k:main:train``), or a list of these, each with a ``weight`` if it likes. Relative paths are looked for
    in the folders of run.plugin_path. ``task``: made of the worked examples of ``[task]``."""
    held_out_file: Files = ""
    """Rows for evaluation only."""
    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Without such a file: how much of ``file`` is for evaluation only."""
    format: Literal["auto", "messages", "prompt_completion", "text", "pairs", "labels"] = "auto"
    """The columns that rows have; auto: as the algorithm wants them, and as their names tell."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names of ours (messages, prompt, completion, text, question, answer, chosen, rejected, label, margin) to the
    files': a column, or a dotted path such as ``extra_info.answer``."""
    chat: bool = False
    """Text becomes a user's and the assistant's message of a chat; messages always are."""
    too_long: Literal["refuse", "skip"] = "refuse"
    """What becomes of a row of more than training.seq_len tokens: it ends the run before it begins, or is left out and
    counted. None is cut."""
    examples_per_step: Count = 32
    """Demonstrations, pairs or labelled answers that one optimizer step is trained on."""
    made_rows: Count = 4096
    """With ``file = "task"``: how many rows are made to train on."""


@dataclass(kw_only=True)
class EvalConfig:
    every: Whole = 0
    """Steps between held-out evaluations; 0: only before the first step and after the last."""
    grader: str = ""
    """A second opinion of each sampled answer that nothing is trained on: ``pkg.module:name`` of a function like a
    reward, or ``task`` for the task's own score beside a reward of yours; empty: none (``titan-rl hack-check``)."""
    prompts: Count = 256
    """Held-out prompts, never trained on, answered greedily, or held-out rows of ``[data]``; a file may have fewer."""
    thinking_budget: Whole | None = None
    """Of held-out and suites' answers, as ``rollout.thinking_budget``; left out: that one; 0: no limit."""
    suites: list[dict[str, Any]] = field(default_factory=list)
    """``[[eval.suites]]``: public sets and other tasks, asked at every evaluation (config/sections/suites.py)."""


@dataclass(kw_only=True)
class CheckpointConfig:
    every: Whole = 0
    """Steps between checkpoints; 0: only when the run ends or is stopped."""
    keep_latest_k: Count = 2
    store: str = ""
    """Where each rank writes its own files: a folder that all hosts share, or a URL of fsspec's, such as
    ``s3://bucket/runs``; empty: the run directory, to which what ranks of other hosts wrote is carried."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """In which the model is written that a run leaves. ``auto``: float32, as it was trained, up to 2 billion
    parameters; above, as the directory has it that the run began with."""
    export_quantization: Quantization = "none"
    """Of that model's linear layers: FP8 weights and scales, as engines with this ``generator.quantization`` have."""


@dataclass(kw_only=True)
class RecoveryConfig:
    snapshot_every: Whole = 1
    """Steps between snapshots of the trainer in memory, from which dead ranks are replaced; 0: a death ends the run."""
    standby: bool = True
    """Have a process of each kind wait, with its imports done, for somebody to die; a few hundred MB of memory each."""
    warm_spares: Whole = 0
    """Engines that wait with their model loaded, instead of a standby, for a generator to die."""
    nonfinite: Literal["skip", "rollback"] = "skip"
    """What follows a loss or gradient that is not finite: another batch, or first a return to the last checkpoint."""
    max_nonfinite_steps: Count = 3
    """Batches in a row with non-finite values after which the run stops."""

    @property
    def has_standbys(self) -> bool:
        return self.standby and self.snapshot_every > 0


@dataclass(kw_only=True)
class MeshConfig:
    transport: Literal["auto", "shared_memory", "cuda_ipc", "rdma_ibverbs", "rdma_tcp", "tcp"] = "auto"
    """How weights and batches travel; auto: the fastest that both ends have, for each pair of ranks."""
    worker_loops: Whole = 0
    """Processes here over which all others are spread, each a failure of its own; 0: the controller spawns them."""
    launcher: str = "local"
    """What starts worker loops: ``local``, or ``pkg.module:name`` of a launcher of your own (mesh/launch/base.py)."""
    fork_servers: bool = True
    """Make actor processes by fork from processes that have done their imports, once for each kind; not below worker
    loops that a launcher of your own started, and not with LD_PRELOAD."""
    start_timeout: Seconds = 300.0
    """Seconds within which all actors must be up."""
    step_timeout: Seconds = 1800.0
    """Seconds that one call to the trainer, or one weight update, may take."""


@dataclass(kw_only=True)
class MetricsConfig:
    tensorboard: bool = True
    wandb: bool = False
    """Also to Weights & Biases, as the run's user is logged in there, or as WANDB_MODE says."""
    trackio: bool = False
    """Also to Trackio, where its package is installed."""
    project: str = "titan_rl"
    """In which these two show the run, by the name of its directory."""


@dataclass(kw_only=True)
class Config:
    """A whole run. ``titan`` holds TorchTitan's sections as they were written."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    implicit_reward: ImplicitRewardConfig = field(default_factory=ImplicitRewardConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    titan: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def sends_adapters(self) -> bool:
        """Whether generators are sent adapters alone."""
        if not self.lora.rank or not self.has_generators:
            return False
        return self.lora.sync == "adapter" or (self.lora.sync == "auto" and self.hosts.is_on)

    @property
    def uses_fp8(self) -> bool:
        """Whether trainer or engines multiply in FP8."""
        recipe = self.titan.get("float8", {}).get("recipe_name", "none")
        return uses_fp8({"generator.quantization": self.generator.quantization, "float8.recipe_name": recipe})

    @property
    def has_generators(self) -> bool:
        """Whether answers are sampled: to learn from, or in a run on data for its suites."""
        return not self.data.file or bool(self.eval.suites)


OUR_SECTIONS = tuple(f.name for f in fields(Config) if f.name != "titan")
