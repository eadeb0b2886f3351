"""Errors keep their kind and their words across processes, and are caught as the built-in that they also are."""

import copy
import inspect
import pickle

import pytest

from contracts import errors
from contracts.errors import FreshnessError, LimbeckError

TREE = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, LimbeckError)]
KINDS = {
    "ConfigError": ValueError,
    "PromptError": ValueError,
    "BatchTypeError": TypeError,
    "BatchValueError": ValueError,
    "MetricTypeError": TypeError,
    "MetricValueError": ValueError,
    "NonFiniteError": FloatingPointError,
    "WeightsError": ValueError,
    "CheckpointError": ValueError,
    "RunFolderError": FileExistsError,
    "WorkerLostError": ConnectionError,
    "DeadlineError": TimeoutError,
    "NotDoneError": RuntimeError,
    "VersionNotHeldError": LookupError,
    "FreshnessError": ValueError,
}


def test_the_tree_has_one_root_and_holds_every_error_of_the_module():
    defined = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    assert set(defined) == set(TREE) and len(TREE) > 20


@pytest.mark.parametrize("kind", [kind for kind in TREE if kind is not LimbeckError])
def test_every_error_is_also_the_built_in_of_its_kind(kind):
    builtin = KINDS["FreshnessError"] if issubclass(kind, FreshnessError) else KINDS[kind.__name__]
    with pytest.raises(builtin) as caught:
        raise kind("what, both sides, what to do")
    assert type(caught.value) is kind and isinstance(caught.value, LimbeckError)


@pytest.mark.parametrize("kind", TREE)
@pytest.mark.parametrize("arguments", [("one message",), (), ("two", "parts")])
@pytest.mark.parametrize("through", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_type_arguments_and_words_survive_pickling(kind, arguments, through):
    error = kind(*arguments)
    arrived = through(error)
    assert type(arrived) is kind and arrived.args == error.args and str(arrived) == str(error)


@pytest.mark.parametrize("kind", TREE)
def test_one_message_is_shown_as_it_was_written(kind):
    assert str(kind("it's wrong:\n  both sides")) == "it's wrong:\n  both sides"


def test_each_refusal_is_counted_under_a_word_of_its_own():
    refusals = [kind for kind in TREE if issubclass(kind, FreshnessError)]
    reasons = [kind.reason for kind in refusals]
    assert len(set(reasons)) == len(refusals) == 9
    assert all(pickle.loads(pickle.dumps(kind("x"))).reason == kind.reason for kind in refusals)
