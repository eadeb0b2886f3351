"""`limbeck eval`: a student measured again."""

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from launch.report import NOTHING, rule_label
from launch.trained import Student, load_student, open_run
from pipeline.evaluation import THRESHOLDS, StudentReport


def evaluate(console: Console, run: str, overrides: Mapping[str, str]) -> None:
    """Decode the run's prompts with its student and print what is right.

    Raises:
      LimbeckError: no such run, no student in it, or prompts that cannot be used.
    """
    folder, config = open_run(run, overrides)
    with console.status("decoding"):
        report, parallelism = measure(load_student(folder, config))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column(f"{config.run.name} {report.version.fingerprint}", no_wrap=True)
    splits = list(report.accuracy_one_forward_per_block) or ["train"]
    for split in splits:
        table.add_column(split.replace("_", " "), justify="right")
    deployed, single = report.accuracy, report.accuracy_one_forward_per_block
    table.add_row(
        f"accuracy at {rule_label(config.deployed_sampler)}", *(_share(deployed.get(name)) for name in splits)
    )
    table.add_row("accuracy, one forward per block", *(_share(single.get(name)) for name in splits))
    rest = [""] * (len(splits) - 1)
    table.add_row("tokens per forward", f"{report.tokens_per_forward:.2f}", *rest)
    table.add_row("  passes that only keep keys counted", f"{report.tokens_per_forward_with_commit_passes:.2f}", *rest)
    table.add_row(
        f"accuracy under parallelism, τ {THRESHOLDS[0]:g} to {THRESHOLDS[-1]:g}",
        NOTHING if parallelism is None else f"{parallelism:.1f}",
        *rest,
    )
    distinct = report.distinct_right_answers
    table.add_row(
        f"distinct right answers of {config.evaluation.diversity_samples}",
        NOTHING if distinct is None else f"{distinct:.1f}",
        *rest,
    )
    table.add_row("cut off before a stop token", _share(report.truncated), *rest)
    table.add_row("empty completions", _share(report.empty), *rest)
    console.print(table, highlight=False)


class Absent:
    """A role that evaluation has no work for."""

    def __init__(self, *, name: str):
        self.name = name


def measure(student: Student) -> tuple[StudentReport, float | None]:
    """Every figure of a student, decoded in this process; and its accuracy under parallelism."""
    from contracts.wire import encode_tree
    from pipeline.evaluation import Evaluator
    from pipeline.inline import InlineRuntime
    from pipeline.workers.parts import Parts
    from pipeline.workers.rollout import RolloutWorker
    from pipeline.workers.spec import WorkerSpec, WorkerSpecs

    ground = student.ground
    parts = Parts(
        config=student.config,
        run_id=student.version.run_id,
        teacher=ground.teacher,
        student=student.shape,
        layout=ground.layout,
        stop_ids=ground.stop_ids,
        tokenizer=ground.tokenizer,
        task=ground.task,
        prompts_digest=ground.source.digest,
        teacher_fingerprint="",
    )
    absent = WorkerSpec(Absent, ())
    runtime = InlineRuntime(WorkerSpecs(WorkerSpec(RolloutWorker, (parts,)), absent, absent), student.config)
    tree = runtime.put("student weights", encode_tree(dict(student.weights)))
    runtime.rollout.publish(student.version, tree)
    evaluator = Evaluator(ground, runtime)
    report = evaluator.report(student.version, diversity=True)
    return report, evaluator.parallelism(student.version) if report.accuracy else None


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"
