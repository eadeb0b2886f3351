"""The sections of a run's settings, each checked by itself."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from contracts.work import SamplerSettings


class Settings(BaseModel):
    """Base of every section: frozen; an unknown key is an error, and so is a number that is infinite or none."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunSettings(Settings):
    """Which run this is."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its folder."""
    folder: str = "runs"
    """Where run folders are made."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides every random draw of the run."""
    cache: str = "~/.cache/limbeck"
    """Where trained toy teachers and compiled programs are kept between runs."""


class TaskSettings(Settings):
    """What is to be learnt: prompts in, a checker out."""

    name: str
    """A built-in task (`split`, `addition`, `instructions`), or `package.module:Class` of your own."""
    prompts: str | None = None
    """JSONL file of prompts; for a task that writes its own, none."""
    field: str = "prompt"
    """Field of a JSONL row that holds the prompt."""
    prompt_length: int = Field(ge=1)
    """Tokens of the longest prompt; a longer one is refused."""
    completion_length: int = Field(ge=1)
    """Tokens of completion that a row may spend."""
    chat: bool = False
    """Put the model's chat template around each prompt."""
    stop_ids: tuple[int, ...] | None = None
    """Tokens that end a completion; none takes the tokenizer's end tokens."""


class ModelSettings(Settings):
    """The decoder, for a teacher that is trained on the spot, or where to find pretrained weights."""

    source: Literal["fresh", "gguf"] = "fresh"
    """`fresh`: the sizes below, trained on the task's corpus. `gguf`: a file with weights and tokenizer."""
    path: str | None = None
    """For `gguf`: a path, or `package:NAME` for the file that an installed package ships."""
    width: int = Field(default=64, ge=2)
    layers: int = Field(default=2, ge=1)
    heads: int = Field(default=4, ge=1)
    kv_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=16, ge=2)
    mlp_width: int = Field(default=192, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations."""

    @model_validator(mode="after")
    def _consistent(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even, for rotary positions")
        if self.source == "gguf" and not self.path:
            raise ValueError("source gguf needs a path: a file, or package:NAME")
        if self.source == "fresh" and self.path:
            raise ValueError(f"path {self.path} is of no use to source fresh; set source to gguf, or leave it out")
        if self.source == "gguf":
            told = [name for name in SIZES if getattr(self, name) != type(self).model_fields[name].default]
            if told:
                raise ValueError(f"the file of source gguf decides the sizes; leave out {', '.join(told)}")
        return self


SIZES = ("width", "layers", "heads", "kv_heads", "head_dim", "mlp_width")
"""Settings of a fresh model only."""


class PretrainingSettings(Settings):
    """Supervised steps on a task's corpus: the toy teacher, or the student's warm start."""

    steps: int = Field(default=0, ge=0)
    rows: int = Field(default=128, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)


class DiffusionSettings(Settings):
    """How the converted model sees a canvas."""

    block_size: int = Field(ge=1)
    mask: Literal["append"] | int = "append"
    """`append` adds a row to the embedding; a number is the id of a row that the tokenizer leaves free."""
    alignment: Literal["same_position", "shifted"] = "same_position"
    canvas: Literal["all_masked", "seed_and_mask"] | None = None
    """Follows from the alignment; stated, it must agree with it."""
    origin: Literal["response", "sequence"] = "response"
    prompt_attention: Literal["causal", "full"] = "causal"
    context: Literal["clean", "corrupted"] = "clean"

    @model_validator(mode="after")
    def _legal_contract(self):
        legal = {"same_position": "all_masked", "shifted": "seed_and_mask"}[self.alignment]
        if self.canvas not in (None, legal):
            raise ValueError(
                f"alignment {self.alignment} decodes from canvas {legal}, not {self.canvas}: the two legal contracts "
                "are same_position + all_masked and shifted + seed_and_mask"
            )
        if self.origin == "sequence" and self.prompt_attention == "full":
            raise ValueError(
                "prompt_attention full has no meaning with origin sequence, which cuts the prompt into blocks: use "
                "prompt_attention causal, or origin response"
            )
        return self


class SamplerConfig(Settings):
    """How completions are decoded: in rollouts, in evaluation and when deployed."""

    rule: Literal["threshold", "static", "factor", "prefix"] = "threshold"
    value: float = 0.9
    """τ in [0, 1] for threshold and prefix; denoising steps per block for static; f > 0 for factor."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0 is greedy."""
    confidence: Literal["proposed", "max"] = "proposed"

    @model_validator(mode="after")
    def _in_domain(self):
        if self.rule in ("threshold", "prefix") and not 0.0 <= self.value <= 1.0:
            raise ValueError(f"τ of rule {self.rule} must lie in [0, 1]; got {self.value}")
        if self.rule == "static" and (self.value < 1 or self.value != int(self.value)):
            raise ValueError(f"rule static needs a whole number of steps ≥ 1; got {self.value}")
        if self.rule == "factor" and self.value <= 0:
            raise ValueError(f"rule factor needs f > 0; got {self.value}")
        return self

    def settings(self) -> SamplerSettings:
        return SamplerSettings(self.rule, float(self.value), self.temperature, self.confidence)


class StatesSettings(Settings):
    """Which canvases the student is trained on."""

    kind: Literal["trajectory", "random"] = "trajectory"
    min_noise: float = Field(default=0.05, ge=0.0, le=1.0)
    truncated: Literal["keep", "mask"] = "keep"
    stop_token_weight: Literal[0, 1] = 1


class ObjectiveSettings(Settings):
    """The loss: soft · divergence(teacher, student) + hard · cross entropy on the student's own tokens."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    beta: float = Field(default=0.5, ge=0.0, le=1.0)
    """Of `jsd`: 0 is forward KL, 1 is reverse KL."""
    temperature: float = Field(default=1.0, gt=0.0)
    soft: float = Field(default=0.9, ge=0.0)
    hard: float = Field(default=0.1, ge=0.0)

    @model_validator(mode="after")
    def _some_weight(self):
        if self.soft == 0 and self.hard == 0:
            raise ValueError("soft and hard are both 0: nothing would be learnt; set one above 0")
        return self


class TrainingSettings(Settings):
    """The on-policy steps."""

    steps: int = Field(ge=1)
    """Windows to close: one update each."""
    rows: int = Field(default=64, ge=1)
    """Prompts per micro-batch; with `micro_batches`, this fixes every array shape of the run."""
    micro_batches: int = Field(default=2, ge=1)
    """Micro-batches per update; they stream: the first is trained while others are still written."""
    learning_rate: float = Field(default=1e-3, gt=0)
    schedule: Literal["constant", "cosine"] = "constant"
    """`cosine` decays to a tenth of the rate over `steps`."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    max_lag: int = Field(default=0, ge=0)
    """How many updates old the weights that write a step are, exactly, once there have been that many."""
    frozen: bool = False
    """Studies only: every rollout is written by the first weights."""
    non_finite: Literal["raise", "skip"] = "raise"
    save_every: int = Field(default=0, ge=0)
    """Checkpoint every so many steps; 0 saves at the end only."""


class EvaluationSettings(Settings):
    """What is measured before and after."""

    rows: int = Field(default=256, ge=1)
    """Prompts of each split that are decoded and checked."""
    batch: int = Field(default=128, ge=1)
    """Rows per evaluation request."""
    every: int = Field(default=0, ge=0)
    """Also evaluate every so many steps; 0: only before and after."""
    sampler: SamplerConfig | None = None
    """The deployed decoding, if it is not the rollout's; what it leaves out is the rollout's."""
    diversity_samples: int = Field(default=32, ge=0)
    """Samples per prompt at temperature 1, for the number of distinct right answers."""
    diversity_prompts: int = Field(default=16, ge=1)


class RoleSettings(Settings):
    """One role's workers and what each asks of its cluster node."""

    count: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.25, gt=0)
    """Logical CPUs: what Ray reserves, not what XLA uses."""
    num_gpus: float = Field(default=0.0, ge=0)
    resources: dict[str, float] = {}
    platform: Literal["cpu", "cuda", "tpu"] = "cpu"
    """JAX_PLATFORMS of the process; asserted when it starts."""
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    """XLA_PYTHON_CLIENT_MEM_FRACTION; required when workers share a GPU."""

    @model_validator(mode="after")
    def _shared_gpu(self):
        if 0 < self.num_gpus < 1 and self.memory_fraction is None:
            raise ValueError(f"num_gpus {self.num_gpus} shares a GPU: set memory_fraction, or use a whole one")
        if self.platform == "cuda" and self.num_gpus == 0:
            raise ValueError("platform cuda needs num_gpus > 0")
        return self


class RunnerSettings(Settings):
    """How the roles are run."""

    kind: Literal["ray", "inline"] = "ray"
    address: str | None = None
    """Of a running Ray cluster; none starts a one-node Ray for this run."""
    visible_cores: int = Field(default=2, ge=2)
    """NPROC of every process: XLA splits reductions by it, so it decides the last bits. The same everywhere."""
    rollout: RoleSettings = RoleSettings(count=2)
    teacher: RoleSettings = RoleSettings()
    trainer: RoleSettings = RoleSettings()
    start_deadline: float = Field(default=120.0, gt=0)
    """Seconds for a worker to start."""
    item_deadline: float = Field(default=600.0, gt=0)
    """Seconds without any result before the run ends with what it waited for."""

    @field_validator("trainer")
    @classmethod
    def _one_trainer(cls, role: RoleSettings) -> RoleSettings:
        if role.count != 1:
            raise ValueError(f"a run has one trainer, not {role.count}; set count to 1")
        return role

    @field_validator("rollout", "teacher")
    @classmethod
    def _one_device(cls, role: RoleSettings) -> RoleSettings:
        if role.num_gpus > 1:
            raise ValueError(
                f"a worker computes on one GPU and would leave the rest of num_gpus {role.num_gpus:g} idle; set "
                "num_gpus to 1 and raise count"
            )
        return role
