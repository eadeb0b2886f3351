"""What a stated version of the student can do: decoded on the rollout workers, checked by the task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from contracts.roles import Handle, Runtime
from contracts.weights import WeightVersion
from contracts.work import Evaluation, EvaluationRequest, Prompt, SamplerSettings
from pipeline.data.prompts import PromptRow, pad_prompts
from pipeline.diffusion.measures import accuracy_under_parallelism
from pipeline.groundwork import TRAIN, Groundwork
from pipeline.loop import reduce_statistics
from pipeline.measures import distinct_right_answers, evenly_spaced
from pipeline.waiting import results_of

ONE_FORWARD_PER_BLOCK = SamplerSettings("static", 1.0)
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class StudentReport:
    """Figures of one version.

    Attributes:
      version: whose.
      accuracy: split → share of right completions with the deployed sampler; empty for a task without right answers.
      tokens_per_forward: committed tokens through the stop per forward pass, deployed sampler, training prompts.
      tokens_per_forward_with_commit_passes: likewise, passes that only keep keys and values counted.
      accuracy_one_forward_per_block: split → share, all tokens of a block in a single forward pass.
      distinct_right_answers: among the configured number of samples at temperature 1; None if not measured.
      truncated, empty: shares of rows.
    """

    version: WeightVersion
    accuracy: Mapping[str, float]
    tokens_per_forward: float
    tokens_per_forward_with_commit_passes: float
    accuracy_one_forward_per_block: Mapping[str, float]
    distinct_right_answers: float | None
    truncated: float
    empty: float


class Evaluator:
    """Sends evaluation requests through a runtime's rollout workers.

    Args:
      ground: prompts, task and settings.
      runtime: with the version to be evaluated published to its rollout pool.
    """

    def __init__(self, ground: Groundwork, runtime: Runtime):
        self._ground = ground
        self._runtime = runtime
        self._settings = ground.config.evaluation

    def report(self, version: WeightVersion, *, diversity: bool) -> StudentReport:
        """Every figure of one version; `diversity` also draws the samples at temperature 1."""
        deployed = self._by_split(version, self._ground.config.deployed_sampler.settings())
        train = deployed[TRAIN]
        # Without right answers there is nothing to ask of single forwards.
        single = self._by_split(version, ONE_FORWARD_PER_BLOCK) if "accuracy" in train else {}
        return StudentReport(
            version=version,
            accuracy={split: values["accuracy"] for split, values in deployed.items() if "accuracy" in values},
            tokens_per_forward=train["tokens_per_forward"],
            tokens_per_forward_with_commit_passes=train["tokens_per_forward_with_commit_passes"],
            accuracy_one_forward_per_block={
                split: values["accuracy"] for split, values in single.items() if "accuracy" in values
            },
            distinct_right_answers=self._distinct(version) if diversity else None,
            truncated=train["truncated"],
            empty=train["empty"],
        )

    def accuracy(
        self, version: WeightVersion, sampler: SamplerSettings, beside: Sequence[Handle] = ()
    ) -> dict[str, dict[str, float]]:
        """Split → name → value with one sampler; ``beside`` is work in flight that the rollout workers do first."""
        return self._by_split(version, sampler, beside)

    def parallelism(self, version: WeightVersion, thresholds: Sequence[float] = THRESHOLDS) -> float | None:
        """Accuracy under parallelism on training prompts, over thresholds of the deployed rule (else of `threshold`).

        Args:
          version: whose.
          thresholds: τ, each in [0, 1]. Those that come to one speed count as one point, at their best accuracy; y_max is
            the highest accuracy among them.

        Returns:
          AUP in percent · tokens per forward, None where nothing is right or the task knows no right answers.
        """
        deployed = self._ground.config.deployed_sampler.settings()
        rule = deployed.rule if deployed.rule in ("threshold", "prefix") else "threshold"
        chosen = evenly_spaced(self._ground.splits[TRAIN], self._settings.rows)
        sent = [
            self._decode(f"τ {value:g}", version, replace(deployed, rule=rule, value=value), chosen)
            for value in thresholds
        ]
        points: dict[float, float] = {}
        for values in (reduce_statistics(self._results(handles)) for handles in sent):
            speed = values["tokens_per_forward"]
            points[speed] = max(points.get(speed, 0.0), 100.0 * values.get("accuracy", 0.0))
        best = max(points.values())
        return accuracy_under_parallelism(list(points), list(points.values()), best) if best else None

    def _by_split(
        self, version: WeightVersion, sampler: SamplerSettings, beside: Sequence[Handle] = ()
    ) -> dict[str, dict[str, float]]:
        rows = {split: evenly_spaced(rows, self._settings.rows) for split, rows in self._ground.splits.items()}
        answers = {split: self._decode(split, version, sampler, chosen) for split, chosen in rows.items()}
        return {split: reduce_statistics(self._results(handles, beside)) for split, handles in answers.items()}

    def _distinct(self, version: WeightVersion) -> float | None:
        samples = self._settings.diversity_samples
        chosen = evenly_spaced(self._ground.splits[TRAIN], self._settings.diversity_prompts)
        if not samples:
            return None
        repeated = [row for row in chosen for _ in range(samples)]
        sampler = replace(self._ground.config.deployed_sampler.settings(), temperature=1.0)
        texts = [
            sample.completion
            for part in self._results(self._decode("diversity", version, sampler, repeated))
            for sample in part.samples
        ]
        judged = [(row, texts[place * samples : (place + 1) * samples]) for place, row in enumerate(chosen)]
        return distinct_right_answers(self._ground.task, judged, samples)

    def _decode(
        self, name: str, version: WeightVersion, sampler: SamplerSettings, rows: Sequence[PromptRow]
    ) -> list[Handle]:
        batch = self._settings.batch
        return [
            self._runtime.rollout.submit(
                "evaluate", self._request(name, version, sampler, rows[start : start + batch], start)
            )
            for start in range(0, len(rows), batch)
        ]

    def _request(
        self, name: str, version: WeightVersion, sampler: SamplerSettings, rows: Sequence[PromptRow], first: int
    ) -> EvaluationRequest:
        # The last request is filled up to the one shape that is compiled; the filling is decoded and not counted.
        size = self._settings.batch
        filled = [*rows, *[rows[0]] * (size - len(rows))]
        prompt_ids_BP, prompt_lengths_B = pad_prompts(filled, self._ground.layout.prompt_length)
        return EvaluationRequest(
            name=f"{name}, rows {first} to {first + len(rows) - 1}",
            version=version,
            seed=self._ground.config.run.seed,
            sampler=sampler,
            stream_indices_B=np.arange(first, first + size, dtype=np.int64),
            prompt_ids_BP=prompt_ids_BP,
            prompt_lengths_B=prompt_lengths_B,
            prompts=tuple(Prompt(row.text, row.fields) for row in rows),
        )

    def _results(self, handles: Sequence[Handle], beside: Sequence[Handle] = ()) -> list[Evaluation]:
        return results_of(self._runtime.waiter, handles, self._ground.config.runner.item_deadline, beside)
