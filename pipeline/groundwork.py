"""What a config settles before any weight exists: task, tokenizer, prompts, shapes, layout; all bad input stops here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import CheckpointError, ConfigError, PromptError
from pipeline.agreement import check_agreement
from pipeline.config import ModelSettings, RunConfig
from pipeline.corpus import Corpus, Encode
from pipeline.data.chat import ChatPrompt
from pipeline.data.prompts import PromptRow, PromptSource, parse_prompts, read_prompts
from pipeline.data.tasks import CorpusTask, Example, Task, load_task
from pipeline.data.tokenizers import CharacterTokenizer, HuggingFaceTokenizer, Tokenizer
from pipeline.diffusion.blocks import BlockLayout
from pipeline.models.config import DecoderConfig
from pipeline.models.conversion import Append, MaskToken, Reserved
from pipeline.models.gguf import gguf_config, gguf_tokenizer, packaged_gguf

TRAIN = "train"


@dataclass(frozen=True)
class Groundwork:
    """Everything but weights. It lies in memory only.

    Attributes:
      config: the settings it was made from.
      task, tokenizer: prompts in, checker out; text to ids.
      encode: a prompt to ids, chat template included.
      teacher: shape of the teacher.
      student_base: shape of the model that is converted into the student; the teacher's unless the config has another.
      mask, layout, stop_ids: how the converted model sees a canvas, and what ends it.
      source: the training prompts by global stream index.
      splits: rows that are evaluated, by split; ``train`` among them.
      own_prompts: JSONL text of each split that the task brings itself.
      corpus: what a fresh teacher learns; None for a pretrained one.
      warm_corpus: what the warm start learns, answers to the training prompts only; None without one.
    """

    config: RunConfig
    task: Task
    tokenizer: Tokenizer
    encode: Encode
    teacher: DecoderConfig
    student_base: DecoderConfig
    mask: MaskToken | None
    layout: BlockLayout
    stop_ids: tuple[int, ...]
    source: PromptSource
    splits: Mapping[str, Sequence[PromptRow]]
    own_prompts: Mapping[str, str]
    corpus: Corpus | None
    warm_corpus: Corpus | None

    def write_prompts(self, folder: Path) -> None:
        """Leave ``prompts/SPLIT.jsonl`` of the task's own splits in a run folder, and the digest of what is trained on."""
        place = folder / "prompts"
        place.mkdir(parents=True, exist_ok=True)
        for split, text in self.own_prompts.items():
            (place / f"{split}.jsonl").write_text(text, encoding="utf-8")
        _digest_file(folder).write_text(f"{self.source.digest}\n", encoding="utf-8")

    def check_same_prompts(self, folder: Path) -> None:
        """Refuse to continue a run folder that was written from other training prompts.

        Raises:
          CheckpointError: showing both digests.
        """
        path = _digest_file(folder)
        if path.is_file() and (then := path.read_text(encoding="utf-8").strip()) != self.source.digest:
            raise CheckpointError(
                f"--resume: the run at {folder} was trained on prompts of digest {then[:16]}, and those of "
                f"{self.config.task.prompts or 'the task'} now have {self.source.digest[:16]}; give it its own prompts "
                "back, or choose another --run.name"
            )


def lay_groundwork(config: RunConfig) -> Groundwork:
    """Settle and check everything that needs no weights; nothing is written.

    Raises:
      ConfigError: task, model, mask, stops or head sizes that cannot go together; every problem by dotted path.
      PromptError: prompts that cannot be used, every row is listed; or examples that no training can use.
      CheckpointError: a model file that is no model file.
    """
    task = load_task(config.task.name)
    tokenizer, teacher = _model("model", config.model, task)
    student_tokenizer, student_base = tokenizer, teacher
    if config.student is not None:
        student_tokenizer, student_base = _model("student", config.student, task)
    mask, mask_id = _mask(config, student_base)
    stop_ids = config.task.stop_ids if config.task.stop_ids is not None else tokenizer.eos_ids

    check_agreement(config, task, (tokenizer, teacher), (student_tokenizer, student_base), mask, stop_ids)
    layout = BlockLayout(
        block_size=config.diffusion.block_size,
        origin=config.diffusion.origin,
        prompt_attention=config.diffusion.prompt_attention,
        alignment=config.diffusion.alignment,
        context=config.diffusion.context,
        prompt_length=config.task.prompt_length,
        completion_length=config.task.completion_length,
        mask_id=mask_id,
        mask_appended=isinstance(mask, Append),
    )
    encode = ChatPrompt(tokenizer) if config.task.chat and isinstance(tokenizer, HuggingFaceTokenizer) else None
    encode = encode or tokenizer.encode
    own_prompts = _own_prompts(config, task)
    splits = _splits(config, own_prompts, encode)

    def corpus(examples: Sequence[Example]) -> Corpus:
        return Corpus(examples, encode, tokenizer.encode, stop_ids[0], layout)

    return Groundwork(
        config=config,
        task=task,
        tokenizer=tokenizer,
        encode=encode,
        teacher=teacher,
        student_base=student_base,
        mask=mask,
        layout=layout,
        stop_ids=tuple(stop_ids),
        source=PromptSource(splits[TRAIN], prompt_length=config.task.prompt_length, seed=config.run.seed),
        splits=splits,
        own_prompts=own_prompts,
        corpus=corpus(_examples(task)) if config.model.source == "fresh" else None,
        warm_corpus=corpus(_warm_examples(config, task, splits[TRAIN])) if config.warm_start.steps else None,
    )


def model_file(settings: ModelSettings) -> Path:
    """The file of a pretrained model; ``package:NAME`` is the one that an installed package ships."""
    assert settings.path is not None
    package = settings.path.removeprefix("package:")
    return packaged_gguf(package) if package != settings.path else Path(settings.path).expanduser()


def _model(path: str, settings: ModelSettings, task: Task) -> tuple[Tokenizer, DecoderConfig]:
    if settings.source == "gguf":
        file = model_file(settings)
        return gguf_tokenizer(file), gguf_config(file, dtype=settings.dtype)
    if not isinstance(task, CorpusTask):
        raise ConfigError(
            f"{path}.source: task {type(task).__name__} has no examples to train a fresh teacher on; name pretrained "
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


def _mask(config: RunConfig, base: DecoderConfig) -> tuple[MaskToken | None, int | None]:
    choice, diffusion = config.diffusion.mask, config.diffusion
    if diffusion.alignment == "shifted" and diffusion.block_size == 1:
        return None, None
    return (Append(), base.vocab_size) if choice == "append" else (Reserved(choice), choice)


def _own_prompts(config: RunConfig, task: Task) -> dict[str, str]:
    """JSONL text by split; a prompts file takes the place of the training prompts."""
    texts = {}
    for split, rows in task.prompts().items():
        if split == TRAIN and config.task.prompts is not None:
            continue
        try:
            texts[split] = "".join(json.dumps(dict(row)) + "\n" for row in rows)
        except TypeError as problem:
            raise PromptError(f"the {split} prompts of task {config.task.name} cannot be JSON: {problem}") from problem
    return texts


def _splits(config: RunConfig, own_prompts: Mapping[str, str], encode: Encode) -> dict[str, list[PromptRow]]:
    length = config.task.prompt_length
    splits = {
        split: parse_prompts(text, f"{split} prompts of task {config.task.name}", encode, prompt_length=length)
        for split, text in own_prompts.items()
    }
    if config.task.prompts is not None:
        path = Path(config.task.prompts).expanduser()
        splits = {TRAIN: read_prompts(path, encode, prompt_length=length, field=config.task.field), **splits}
    if TRAIN not in splits:
        raise PromptError(
            f"task {config.task.name} brings no training prompts; name a JSONL file in task.prompts, one object a line"
        )
    return splits


def _examples(task: Task) -> Sequence[Example]:
    assert isinstance(task, CorpusTask), "the config was checked: what is trained here needs a corpus"
    return task.examples()


def _warm_examples(config: RunConfig, task: Task, rows: Sequence[PromptRow]) -> list[Example]:
    prompts = {row.text for row in rows}
    chosen = [example for example in _examples(task) if example.prompt in prompts]
    if not chosen:
        raise PromptError(
            f"warm_start.steps: {config.warm_start.steps}, but none of the {len(rows)} training prompts is an example of "
            f"task {config.task.name}; set it to 0, or give prompts that the task knows answers to"
        )
    return chosen


def _digest_file(folder: Path) -> Path:
    return folder / "prompts" / "sha256"
