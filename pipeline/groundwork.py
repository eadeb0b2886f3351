"""What a config settles before any weight exists: task, tokenizer, prompts, shapes, layout; all bad input stops here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError, PromptError
from pipeline.config import ModelSettings, RunConfig
from pipeline.data.chat import ChatPrompt
from pipeline.data.prompts import PromptRow, PromptSource, read_prompts
from pipeline.data.tasks import CorpusTask, Task, load_task
from pipeline.data.tokenizers import CharacterTokenizer, HuggingFaceTokenizer, Tokenizer
from pipeline.diffusion.blocks import BlockLayout
from pipeline.models.config import DecoderConfig
from pipeline.models.conversion import Append, MaskToken, Reserved, check_head_sizes, check_mask_id
from pipeline.models.gguf import gguf_config, gguf_tokenizer, packaged_gguf

TRAIN = "train"


@dataclass(frozen=True)
class Groundwork:
    """Everything but weights.

    Attributes:
      config: the settings it was made from.
      task, tokenizer: prompts in, checker out; text to ids.
      teacher: shape of the teacher.
      student_base: shape of the model that is converted into the student; the teacher's unless the config has another.
      mask, layout, stop_ids: how the converted model sees a canvas, and what ends it.
      source: the training prompts by global stream index.
      splits: rows that are evaluated, by split; ``train`` among them.
    """

    config: RunConfig
    task: Task
    tokenizer: Tokenizer
    teacher: DecoderConfig
    student_base: DecoderConfig
    mask: MaskToken | None
    layout: BlockLayout
    stop_ids: tuple[int, ...]
    source: PromptSource
    splits: Mapping[str, Sequence[PromptRow]]


def lay_groundwork(config: RunConfig, folder: Path) -> Groundwork:
    """Settle and check everything that needs no weights.

    Args:
      config: the run's settings.
      folder: where a task that brings its own prompts writes them, as ``prompts/SPLIT.jsonl``.

    Raises:
      ConfigError: task, model, mask, stops or head sizes that cannot go together.
      PromptError: prompts that cannot be used; every row is listed.
      CheckpointError: a model file that is no model file.
    """
    task = load_task(config.task.name)
    tokenizer, teacher = _model(config.model, task)
    student_base = teacher
    if config.student is not None:
        student_tokenizer, student_base = _model(config.student, task)
        _same_language(tokenizer, student_tokenizer)
    mask, mask_id = _mask(config, student_base)
    stop_ids = config.task.stop_ids if config.task.stop_ids is not None else tokenizer.eos_ids
    if not stop_ids or any(not 0 <= stop < tokenizer.vocab_size for stop in stop_ids):
        raise ConfigError(
            f"task.stop_ids: {list(stop_ids)} must be at least one id in [0, {tokenizer.vocab_size}), the vocabulary"
        )
    if mask_id is not None:
        check_mask_id(mask_id, pad_id=None, bos_id=None, eos_id=None, stop_ids=(*stop_ids, *tokenizer.eos_ids))
    extra = 1 if isinstance(mask, Append) else 0
    check_head_sizes(replace(student_base, vocab_size=student_base.vocab_size + extra), teacher, mask)
    diffusion = config.diffusion
    layout = BlockLayout(
        block_size=diffusion.block_size,
        origin=diffusion.origin,
        prompt_attention=diffusion.prompt_attention,
        alignment=diffusion.alignment,
        context=diffusion.context,
        prompt_length=config.task.prompt_length,
        completion_length=config.task.completion_length,
        mask_id=mask_id,
        mask_appended=isinstance(mask, Append),
    )
    splits = _splits(config, task, tokenizer, folder)
    source = PromptSource(splits[TRAIN], prompt_length=config.task.prompt_length, seed=config.run.seed)
    return Groundwork(config, task, tokenizer, teacher, student_base, mask, layout, tuple(stop_ids), source, splits)


def model_file(settings: ModelSettings) -> Path:
    """The file of a pretrained model; ``package:NAME`` is the one that an installed package ships."""
    assert settings.path is not None
    package = settings.path.removeprefix("package:")
    return packaged_gguf(package) if package != settings.path else Path(settings.path).expanduser()


def _model(settings: ModelSettings, task: Task) -> tuple[Tokenizer, DecoderConfig]:
    if settings.source == "gguf":
        path = model_file(settings)
        return gguf_tokenizer(path), gguf_config(path, dtype=settings.dtype)
    if not isinstance(task, CorpusTask):
        raise ConfigError(
            f"model.source: task {type(task).__name__} has no examples to train a fresh teacher on; name pretrained "
            "weights (source gguf), or give the task an alphabet and examples()"
        )
    tokenizer = CharacterTokenizer(task.alphabet)
    return tokenizer, DecoderConfig(
        vocab_size=tokenizer.vocab_size,
        width=settings.width,
        layers=settings.layers,
        heads=settings.heads,
        kv_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        mlp_width=settings.mlp_width,
        dtype=settings.dtype,
    )


def _same_language(teacher: Tokenizer, student: Tokenizer) -> None:
    if teacher.eos_ids != student.eos_ids:
        raise ConfigError(
            f"teacher and student end differently: the teacher's end tokens are {list(teacher.eos_ids)}, the student's "
            f"{list(student.eos_ids)}. Use models of one family, or set task.stop_ids and give both the same"
        )
    if teacher.digest != student.digest:
        raise ConfigError(
            f"teacher and student read ids differently: tokenizer digests {teacher.digest[:16]} and "
            f"{student.digest[:16]}, vocabularies of {teacher.vocab_size} and {student.vocab_size}"
        )


def _mask(config: RunConfig, base: DecoderConfig) -> tuple[MaskToken | None, int | None]:
    choice, diffusion = config.diffusion.mask, config.diffusion
    if diffusion.alignment == "shifted" and diffusion.block_size == 1:
        return None, None
    if choice == "append":
        return Append(), base.vocab_size
    if not 0 <= choice < base.vocab_size:
        raise ConfigError(
            f"diffusion.mask: id {choice} is not among the {base.vocab_size} rows of the embedding; name a free row, or "
            "`append`"
        )
    return Reserved(choice), choice


def _splits(config: RunConfig, task: Task, tokenizer: Tokenizer, folder: Path) -> dict[str, list[PromptRow]]:
    encode = tokenizer.encode
    if config.task.chat:
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise ConfigError("task.chat: only a pretrained tokenizer has a chat template; set it to false")
        encode = ChatPrompt(tokenizer)
    files = {split: _written(folder / "prompts" / f"{split}.jsonl", rows) for split, rows in task.prompts().items()}
    field = dict.fromkeys(files, "prompt")
    if config.task.prompts is not None:
        files[TRAIN], field[TRAIN] = Path(config.task.prompts).expanduser(), config.task.field
    if TRAIN not in files:
        raise PromptError(
            f"task {config.task.name} brings no training prompts; name a JSONL file in task.prompts, one object a line"
        )
    return {
        split: read_prompts(path, encode, prompt_length=config.task.prompt_length, field=field[split])
        for split, path in files.items()
    }


def _written(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows), encoding="utf-8")
    return path
