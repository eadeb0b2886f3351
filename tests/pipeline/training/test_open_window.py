"""What the open window takes, refuses and shows."""

import numpy as np
import optax
import pytest

from contracts.errors import BatchTypeError, BatchValueError, ConfigError


def aligned(array):
    """A copy at an address that JAX shares on the processor instead of copying."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    view = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_that_the_caller_overwrites_has_been_taken(small, depth):
    batch = {name: aligned(value) for name, value in small.batch(2, seed=1).items()}
    expected = small.trainer(small.capture(), depth=depth)
    expected.accumulate({name: value.copy() for name, value in batch.items()})
    trainer = small.trainer(small.capture(), depth=depth)
    trainer.accumulate(batch)
    batch["weights"][:] = 0
    assert trainer.update().loss == expected.update().loss


def test_windows_refuse_what_does_not_fit_and_stay_as_they_were(small):
    trainer = small.trainer(depth=2)
    with pytest.raises(BatchValueError, match=r"call accumulate\(\)"):
        trainer.update()
    batch = small.batch(2, seed=1)
    trainer.accumulate(batch)
    with pytest.raises(BatchValueError, match="1 micro-batches"):
        trainer.state()
    trainer.accumulate(batch)
    before = trainer.accumulator_digest()
    with pytest.raises(BatchValueError, match=r"call update\(\)"):
        trainer.accumulate(batch)
    assert trainer.accumulator_digest() == before
    trainer.update()
    with pytest.raises(BatchTypeError, match=r"batch\['tokens'\]\[0\] is int"):
        trainer.accumulate({"tokens": [1, 2]})
    with pytest.raises(ConfigError, match="with_loss_fn"):
        type(trainer)(small.Model(), optax.sgd(0.1), trainer.config).evaluate(batch)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_digest_of_the_open_window_changes_with_every_micro_batch(small, depth):
    trainer = small.trainer(depth=depth)
    seen = [trainer.accumulator_digest()]
    for seed in range(depth):
        trainer.accumulate(small.batch(2, seed=seed))
        seen.append(trainer.accumulator_digest())
    assert len(set(seen)) == depth + 1
    assert trainer.accumulator_digest() == seen[-1]
