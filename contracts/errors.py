"""Every error Limbeck raises on purpose: one tree, each class also its built-in kin.

Arguments are positional and passed on unchanged, so that an instance survives the pickling between processes: Ray
re-raises a worker's error in the caller, and ``except StaleBatchError`` must still match there. A message says what is
wrong, shows both sides, and says what to do.
"""


class LimbeckError(Exception):
    """Root of the tree."""


class ConfigError(LimbeckError, ValueError):
    """A configuration that cannot describe a run; raised before anything is started."""


class PromptError(LimbeckError, ValueError):
    """A prompt source, or a row of one, that cannot be used; raised before any model runs."""


class BatchTypeError(LimbeckError, TypeError):
    """A batch made of the wrong types or dtypes."""


class BatchValueError(LimbeckError, ValueError):
    """A batch whose shapes or values contradict each other."""


class MetricTypeError(LimbeckError, TypeError):
    """A metric that changed its kind inside one accumulation window."""


class MetricValueError(LimbeckError, ValueError):
    """Metrics that cannot be added because their bounds differ."""


class NonFiniteError(LimbeckError, FloatingPointError):
    """A loss or gradient that is NaN or infinite."""


class WeightsError(LimbeckError, ValueError):
    """A tree of weights that is not the one described: missing, surplus or misshapen leaves, or another fingerprint."""


class CheckpointError(LimbeckError, ValueError):
    """A checkpoint that is absent, damaged, or was made by another run."""


class RunFolderError(LimbeckError, FileExistsError):
    """A run folder that may not be written."""


class WorkerLostError(LimbeckError, ConnectionError):
    """A worker process that died or could not be replaced."""


class DeadlineError(LimbeckError, TimeoutError):
    """A wait that ran out; the message names what was waited for."""


class NotDoneError(LimbeckError, RuntimeError):
    """A result that was used before a `Waiter` reported it done."""


class VersionNotHeldError(LimbeckError, LookupError):
    """A worker was asked to use student weights that it does not hold."""


class FreshnessError(LimbeckError, ValueError):
    """A batch the trainer refuses. ``reason`` is the word under which refusals are counted."""

    reason = "refused"


class StaleBatchError(FreshnessError):
    """Written by weights older than the schedule allows."""

    reason = "stale"


class FutureBatchError(FreshnessError):
    """Written by weights newer than the schedule allows, or made for a step that is not open yet."""

    reason = "future"


class ForeignBatchError(FreshnessError):
    """Written by another run."""

    reason = "foreign"


class FingerprintMismatchError(FreshnessError):
    """Claims the right step, but the weights that wrote it are not those published for it."""

    reason = "fingerprint"


class DuplicateBatchError(FreshnessError):
    """Already applied."""

    reason = "duplicate"


class OutOfOrderBatchError(FreshnessError):
    """Arrived before a micro-batch with a lower index."""

    reason = "out_of_order"


class TargetsMismatchError(FreshnessError):
    """Teacher targets that belong to another rollout, teacher, kind or temperature."""

    reason = "targets"


class CorruptBatchError(FreshnessError):
    """A batch whose content no longer has the digest it was sealed with."""

    reason = "corrupt"
