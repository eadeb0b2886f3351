"""`limbeck generate`: a student writing, block by block, as it happens."""

import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from contracts.errors import PromptError
from launch.canvas import Row, completion, draw, row_of
from launch.report import rule_label
from launch.trained import Student, load_student, open_run


def generate(console: Console, run: str, prompts: Sequence[str], overrides: Mapping[str, str], *, delay: float) -> None:
    """Complete prompts with the student of a run. On a terminal each denoising step is shown; piped, the result alone.

    Raises:
      LimbeckError: no such run, no student in it, or a prompt that it cannot read.
    """
    if not prompts:
        raise PromptError('nothing to complete: give --prompt "..." once or several times')
    folder, config = open_run(run, overrides)
    student = load_student(folder, config)
    tokens = [_encoded(student, prompt) for prompt in prompts]
    ground = student.ground
    rows: list[Row] = []
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
            for rows in _steps(student, prompts, tokens):
                live.update(Group(*(draw(row, ground.tokenizer.decode, ground.stop_ids) for row in rows)), refresh=True)
                time.sleep(delay)
            live.update(Group(*_lines(student, prompts, rows)))
            live.refresh()
    else:
        *_, rows = _steps(student, prompts, tokens)
        for line in _lines(student, prompts, rows):
            console.print(line, soft_wrap=True)
    written, forwards = sum(row.tokens for row in rows), max(sum(row.forwards for row in rows), 1)
    rule = rule_label(config.deployed_sampler)
    console.print(
        Text(f"\n{written} tokens in {forwards} forward passes, {written / forwards:.2f} a pass, at {rule}", "dim")
    )


def _lines(student: Student, prompts: Sequence[str], rows: Sequence[Row]) -> list[Text]:
    """The finished rows, with the checker's verdict on prompts that are the task's own."""
    ground = student.ground
    lines = []
    for prompt, row in zip(prompts, rows, strict=True):
        text = completion(row, ground.tokenizer.decode, ground.stop_ids)
        verdict = _verdict(student, prompt, text)
        mark = {True: Text("  ✓", "green"), False: Text("  ✗", "red"), None: Text()}[verdict]
        cut = Text(f"  (cut off after {row.tokens} tokens)", "yellow") if row.truncated else Text()
        lines.append(Text(row.prompt, "dim").append(text, "not dim bold").append(mark).append(cut))
    return lines


def _verdict(student: Student, prompt: str, text: str) -> bool | None:
    """None for a prompt of somebody's own: a checker may not be able to read it."""
    from contracts.work import Prompt

    own = [row for rows in student.ground.splits.values() for row in rows if row.text == prompt]
    return student.ground.task.correct(Prompt(prompt, own[0].fields), text) if own else None


def _encoded(student: Student, prompt: str) -> list[int]:
    tokens, limit = list(student.ground.encode(prompt)), student.config.task.prompt_length
    if not 1 <= len(tokens) <= limit:
        raise PromptError(
            f"the prompt {prompt!r} has {len(tokens)} tokens; this student reads 1 to {limit} (task.prompt_length)"
        )
    return tokens


def _steps(student: Student, prompts: Sequence[str], tokens: Sequence[Sequence[int]]) -> Iterator[list[Row]]:
    """The rows after each denoising step."""
    import jax
    import numpy as np

    from pipeline.diffusion.decoding import decode_blocks
    from pipeline.diffusion.keys import evaluation_keys

    config, layout = student.config, student.ground.layout
    prompt_ids_BP = np.zeros((len(tokens), layout.prompt_length), np.int32)
    lengths_B = np.array([len(row) for row in tokens], np.int32)
    for row, ids in enumerate(tokens):
        prompt_ids_BP[row, : len(ids)] = ids
    keys_B = evaluation_keys(config.run.seed, np.arange(len(tokens)))
    sampler = config.deployed_sampler.settings()
    # A chat's answer begins on a line of its own; a plain completion goes on where the prompt ends.
    shown = [f"{prompt}\n" if config.task.chat else prompt for prompt in prompts]
    rows: list[Row] = []
    for decoded in decode_blocks(
        student.decoder(), prompt_ids_BP, lengths_B, keys_B, layout, sampler, student.ground.stop_ids
    ):
        host = jax.device_get(decoded)
        rows = [
            row_of(prompt, host, row, int(lengths_B[row]), layout, rows[row] if rows else None)
            for row, prompt in enumerate(shown)
        ]
        yield rows
