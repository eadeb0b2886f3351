"""What settings, task, teacher and student must agree on before a run starts."""

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from contracts.errors import ConfigError
from pipeline.config import RunConfig
from pipeline.data.tasks import CorpusTask, Task
from pipeline.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from pipeline.models.config import DecoderConfig
from pipeline.models.conversion import Append, MaskToken, Reserved, check_head_sizes, check_mask_id

Model = tuple[Tokenizer, DecoderConfig]


def check_agreement(
    config: RunConfig,
    task: Task,
    teacher: Model,
    student: Model,
    mask: MaskToken | None,
    stop_ids: Sequence[int],
) -> None:
    """Refuse what cannot go together.

    Args:
      config, task: what is asked for.
      teacher, student: tokenizer and shape; the student's before its conversion.
      mask: where the student's mask token will live.
      stop_ids: what ends a completion of either.

    Raises:
      ConfigError: every problem by dotted path.
    """
    problems = _Problems()
    with problems:
        _check_stops(config, teacher[0], student[0], stop_ids)
    with problems:
        _check_same_language(teacher[0], student[0])
    with problems:
        _check_heads(student[1], teacher[1], mask)
    with problems:
        _check_mask(mask, student, stop_ids)
    with problems:
        _check_context(config, teacher[1], student[1])
    with problems:
        if config.task.chat and not isinstance(teacher[0], HuggingFaceTokenizer):
            raise ConfigError("task.chat: only a pretrained tokenizer has a chat template; set it to false")
    with problems:
        if config.warm_start.steps and not isinstance(task, CorpusTask):
            raise ConfigError(
                f"warm_start.steps: {config.warm_start.steps}, but task {config.task.name} has no examples to warm up "
                "on; set it to 0, or give the task an alphabet and examples()"
            )
    problems.raise_any()


class _Problems:
    """Collects what is refused inside ``with problems:``, so that everything is told at once."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(problem, ConfigError):
            self._found.append(str(problem))
            return True
        return False

    def raise_any(self) -> None:
        if self._found:
            raise ConfigError("\n".join(self._found))


def _check_stops(config: RunConfig, teacher: Tokenizer, student: Tokenizer, stop_ids: Sequence[int]) -> None:
    if not stop_ids or any(not 0 <= stop < teacher.vocab_size for stop in stop_ids):
        raise ConfigError(
            f"task.stop_ids: {list(stop_ids)} must be at least one id in [0, {teacher.vocab_size}), the vocabulary"
        )
    # Ids that the config names are both sides' stops, whatever their files say.
    if config.task.stop_ids is None and set(teacher.eos_ids) != set(student.eos_ids):
        raise ConfigError(
            f"task.stop_ids: teacher and student end differently: the teacher's end tokens are {list(teacher.eos_ids)}, "
            f"the student's {list(student.eos_ids)}. Name the ids that end a completion of either"
        )


def _check_same_language(teacher: Tokenizer, student: Tokenizer) -> None:
    if teacher.digest != student.digest:
        raise ConfigError(
            f"student: teacher and student read ids differently: tokenizer digests {teacher.digest[:16]} and "
            f"{student.digest[:16]}, vocabularies of {teacher.vocab_size} and {student.vocab_size}; use models of one family"
        )


def _check_heads(student: DecoderConfig, teacher: DecoderConfig, mask: MaskToken | None) -> None:
    extra = 1 if isinstance(mask, Append) else 0
    try:
        check_head_sizes(replace(student, vocab_size=student.vocab_size + extra), teacher, mask)
    except ConfigError as problem:
        raise ConfigError(f"student: {problem}") from None


def _check_mask(mask: MaskToken | None, student: Model, stop_ids: Sequence[int]) -> None:
    if not isinstance(mask, Reserved):
        return
    tokenizer, base = student
    if not 0 <= mask.id < base.vocab_size:
        raise ConfigError(
            f"diffusion.mask: id {mask.id} is not among the {base.vocab_size} rows of the embedding; name a free row, "
            "or `append`"
        )
    eos, *others = tokenizer.eos_ids
    try:
        check_mask_id(
            mask.id, pad_id=tokenizer.pad_id, bos_id=tokenizer.bos_id, eos_id=eos, stop_ids={*stop_ids, *others}
        )
    except ConfigError as problem:
        raise ConfigError(f"diffusion.mask: {problem}") from None


def _check_context(config: RunConfig, teacher: DecoderConfig, student: DecoderConfig) -> None:
    prompt, completion = config.task.prompt_length, config.task.completion_length
    limit = min((shape.context_length for shape in (teacher, student) if shape.context_length), default=None)
    if limit is not None and prompt + completion > limit:
        raise ConfigError(
            f"task.prompt_length, task.completion_length: {prompt} + {completion} tokens, but the model knows sequences "
            f"of up to {limit}; shorten one"
        )
