"""What every worker of a run is made from: settings and small objects, no weights."""

from dataclasses import dataclass

from flax import nnx

from contracts.freshness import FreshnessPolicy, TeacherIdentity
from pipeline.config import RunConfig
from pipeline.data.tasks import Task
from pipeline.data.tokenizers import Tokenizer
from pipeline.diffusion.blocks import BlockLayout
from pipeline.models.config import DecoderConfig
from pipeline.models.decoder import Decoder


@dataclass(frozen=True)
class Parts:
    """Picklable; the same for every worker of a run.

    Attributes:
      config: the run's settings.
      run_id: identity that versions and rollouts carry.
      teacher, student: the two decoders' shapes; same family, the student may have one more row for the mask.
      layout: how completions are cut into blocks.
      stop_ids: tokens that end a completion, the same for teacher and student.
      tokenizer, task: ids to text, and the checker.
      prompts_digest: of the training prompts.
      teacher_fingerprint: of the one teacher of this run.
    """

    config: RunConfig
    run_id: str
    teacher: DecoderConfig
    student: DecoderConfig
    layout: BlockLayout
    stop_ids: tuple[int, ...]
    tokenizer: Tokenizer
    task: Task
    prompts_digest: str
    teacher_fingerprint: str

    @property
    def policy(self) -> FreshnessPolicy:
        training = self.config.training
        return FreshnessPolicy(self.run_id, training.max_lag, training.frozen)

    @property
    def teacher_identity(self) -> TeacherIdentity:
        return TeacherIdentity(self.teacher_fingerprint, "dense", self.config.objective.temperature)


def abstract_decoder(config: DecoderConfig) -> Decoder:
    """A decoder without arrays, to be filled with loaded weights."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
