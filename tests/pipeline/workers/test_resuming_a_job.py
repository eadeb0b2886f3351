"""A job that is stopped and resumed, in this process: same weights, same figures of its beginning, no event twice."""

import pytest

from pipeline.build import assemble
from pipeline.inline import InlineRuntime
from pipeline.job import Job, Outcome
from pipeline.testing import ListRecorder


class StopError(Exception):
    pass


class StoppingRecorder(ListRecorder):
    """Ends the run at the update of step 1, after the checkpoint of step 1."""

    def event(self, kind, **fields):
        super().event(kind, **fields)
        if kind == "update" and fields["step"] == 1:
            raise StopError


@pytest.fixture
def run(make_config, prepared, tmp_path):
    """`(name, recorder, resume) -> Outcome` in a folder of that name."""
    training = {"steps": 3, "max_lag": 1, "save_every": 1}
    config = make_config(training=training, evaluation={"every": 1, "diversity_samples": 0})
    ground = prepared.ground.__class__(**{**vars(prepared.ground), "config": config})

    def run(name: str, recorder: ListRecorder, *, resume: bool = False, watch=None) -> Outcome:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        preparation = assemble(ground, prepared.weights, folder)
        runtime = InlineRuntime(preparation.specs, config)
        if watch is not None:
            watch(runtime)
        return Job(preparation, runtime, recorder).run(folder, resume=resume)

    return run


def test_a_resumed_job_ends_as_an_undisturbed_one_and_still_knows_its_beginning(run):
    undisturbed = run("whole", ListRecorder())
    with pytest.raises(StopError):
        run("broken", StoppingRecorder())
    recorder = ListRecorder()
    resumed = run("broken", recorder, resume=True)
    assert resumed.version == undisturbed.version
    assert (resumed.before, resumed.warmed) == (undisturbed.before, undisturbed.warmed)
    assert resumed.before is not None and resumed.before.version.step == 0
    steps = [(event["kind"], event["step"]) for event in recorder.events if event["kind"] in ("publish", "resume")]
    assert steps == [("resume", 1), ("publish", 2), ("publish", 3)], "version 0 is not published a second time"


def test_an_evaluation_between_steps_waits_beside_the_rollouts_that_are_already_under_way(run):
    """Else a busy pool of slow rollouts in front of the evaluation would be taken for a dead one."""
    waits: list[set[str]] = []

    def watch(runtime):
        wait = runtime.waiter.wait

        def note(handles, timeout):
            waits.append({handle.method for handle in handles})
            return wait(handles, timeout)

        runtime.waiter.wait = note

    run("watched", ListRecorder(), watch=watch)
    assert {"evaluate", "generate"} in waits
