"""The error tree: as drawn, picklable, and with its facts."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from mapstate import errors
from mapstate.errors import ConfigurationError, FencedError, MapStateError, StoreError

CLASSES = {
    name: one
    for name, one in vars(errors).items()
    if inspect.isclass(one) and issubclass(one, MapStateError) and one.__module__ == errors.__name__
}


def drawn():
    """Each class of the docstring's tree with the one it hangs on, and what is said of it."""
    path: list[str] = []
    parents: dict[str, str | None] = {}
    said: dict[str, str] = {}
    for line in errors.__doc__.splitlines():
        label = line.strip().lstrip("│├└─ \N{NO-BREAK SPACE}")
        name, _, words = label.partition(" ")
        if not name.endswith("Error") or name != label.split()[0]:
            continue
        depth = (len(line) - len(line.lstrip(" │├└─"))) // 4 - 1
        path[depth:] = [name]
        parents[name] = path[depth - 1] if depth else None
        said[name] = words.strip()
    return parents, said


def test_the_tree_of_the_docstring_is_the_tree_of_the_classes():
    parents, said = drawn()
    assert parents.pop("MapStateError") is None
    assert parents == {name: one.__bases__[0].__name__ for name, one in CLASSES.items() if one is not MapStateError}
    assert all(said[name] for name in parents)


def test_all_names_every_error_and_nothing_else():
    assert sorted(errors.__all__) == sorted(CLASSES)


@pytest.mark.parametrize("kind", CLASSES.values(), ids=list(CLASSES))
def test_an_error_is_pickled_with_its_facts(kind):
    """Executors raise them; the driver wants to know the state, the key and the numbers."""
    error = kind("what was found, and what to do", state="visits", txid=0, key=None, spans=[[1, 2]], ok=False)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind
        assert str(again) == again.message == "what was found, and what to do"
        assert again.args == error.args
        assert again.facts == error.facts
        assert (again.state, again.txid, again.key, again.spans, again.ok) == ("visits", 0, None, [[1, 2]], False)


@pytest.mark.parametrize("kind", CLASSES.values(), ids=list(CLASSES))
def test_an_error_takes_its_message_as_the_only_positional_argument(kind):
    with pytest.raises(TypeError):
        kind("message", "state")
    with pytest.raises(TypeError):
        kind()


@pytest.mark.parametrize("kind", CLASSES.values(), ids=list(CLASSES))
def test_an_error_says_in_its_docstring_when_it_is_raised(kind):
    assert "__doc__" in vars(kind)
    assert len(kind.__doc__) > 20


def test_a_fact_that_was_not_given_is_no_attribute():
    error = FencedError("m", txid=1)
    assert not hasattr(error, "epoch")
    with pytest.raises(AttributeError, match="epoch"):
        _ = error.epoch


def test_what_is_wrong_before_a_run_is_told_from_what_goes_wrong_in_it():
    """Applications catch by branch: a misspelt option is not a store that is down."""
    assert {one.__name__ for one in MapStateError.__subclasses__()} == {
        "ConfigurationError",
        "UsageError",
        "CheckpointError",
        "DataError",
        "DRPCError",
        "LedgerError",
        "StoreError",
    }
    assert not issubclass(ConfigurationError, (StoreError, OSError))


BUILT_INS: dict[str, list[type[BaseException]]] = {
    "ConfigurationError": [ValueError],
    "MissingDriverError": [ImportError],
    "UnknownColumnError": [KeyError],
    "UnsupportedTypeError": [TypeError],
    "NotPicklableError": [pickle.PicklingError],
    "ExecutorEnvironmentError": [ImportError],
    "UsageError": [ValueError],
    "CheckpointError": [OSError],
    "KeyEncodingError": [ValueError],
    "SerializationError": [ValueError],
    "ValueOverflowError": [OverflowError],
    "TooLargeError": [ValueError],
    "CorruptRecordError": [ValueError],
    "StateNotFoundError": [LookupError],
    "StoreUnavailableError": [ConnectionError, TimeoutError],
    "StoreAuthError": [PermissionError],
    "ChangesGoneError": [LookupError],
    "WindowGoneError": [LookupError],
    "NotAliveError": [LookupError],
}


@pytest.mark.parametrize("kind", CLASSES.values(), ids=list(CLASSES))
def test_code_that_knows_only_built_in_errors_catches_what_fits(kind):
    expected = BUILT_INS.get(kind.__name__, [])
    own = [base for base in kind.__bases__ if not issubclass(base, MapStateError)]
    assert own == ([Exception] if kind is MapStateError else expected)
    words = drawn()[1].get(kind.__name__, "")
    drawn_as = words[:-1].rpartition("(")[2].split(", ") if words.endswith(")") else []
    assert drawn_as == [base.__name__ for base in expected]
    for built_in in expected:
        with pytest.raises(built_in) as caught:
            raise kind("the message, as it is", key="a")
        assert str(caught.value) == "the message, as it is"


def test_an_error_shows_its_message_unquoted_and_takes_notes():
    error = errors.UnknownColumnError("there is no column 'a'")
    error.add_note("in attempt 2")
    assert f"{error}" == "there is no column 'a'"
    assert repr(error) == """UnknownColumnError("there is no column 'a'")"""
