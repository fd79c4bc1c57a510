"""What follows an attempt that failed: each row and cell of the table of `retry_policy`."""

from __future__ import annotations

from typing import Any

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, PySparkValueError, PythonException

from mapstate import Count, Sum, Topology, errors, newStream, non_transactional, opaque, open_reader, transactional
from mapstate.backends import resolve
from mapstate.spark.driver.retry_policy import Cause, Decision, RetryPolicy, cause_of
from mapstate.testing import Fail, FaultyBackend

ANEW, RAISE, ASIDE = Decision.BEGIN_ANEW, Decision.RAISE, Decision.SET_ASIDE
LOST = [
    errors.IncompleteBatchError("a task ran twice"),
    errors.StoreRestartedError("restarted"),
    Py4JError("a worker died"),
    PythonException("a worker died"),
]
DATA = [
    errors.ValueOverflowError("too large"),
    errors.AggregatorError("raised"),
]
FINAL = [
    AnalysisException("no such column"),
    PySparkValueError("no truth value"),
    errors.CorruptRecordError("damaged: every batch with its key would be set aside"),
    errors.UsageError("twice"),
    errors.StateSchemaError("other keys"),
    errors.StateOwnershipError("another query"),
    errors.FencedError("another driver"),
    errors.StoreLostError("gone"),
    errors.StoreFullError("full"),
    ValueError("a user's own"),
]
AWAY = errors.StoreUnavailableError("away")


def policy(*makers: Any, wanted: bool = True, sets_aside: bool = False, **options: Any) -> RetryPolicy:
    options = {"max_attempts": 3, "patience": 0} | options
    specs = [make("memory://", f"s{at}", **options) for at, make in enumerate(makers)]
    return RetryPolicy(specs, lambda: wanted, sets_aside=sets_aside)


def decisions(of: RetryPolicy, error: Exception, times: int) -> list[Decision]:
    return [of.after(error) for _ in range(times)]


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("make", [opaque, transactional])
def test_a_lost_attempt_is_begun_anew_until_max_attempts_and_then_raised_with_a_note(make, error):
    error = type(error)("lost")
    assert decisions(policy(make), error, 3) == [ANEW, ANEW, RAISE]
    assert error.__notes__ == ["This was attempt 3; max_attempts is 3."]


@pytest.mark.parametrize("error", [*LOST, *DATA, *FINAL], ids=lambda error: type(error).__name__)
def test_nothing_of_a_non_transactional_state_is_begun_anew(error):
    assert policy(non_transactional).after(error) is RAISE
    assert policy(opaque, non_transactional).after(error) is RAISE


def test_a_store_that_does_not_answer_is_waited_for_and_uses_up_no_attempt(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    asked = policy(opaque, patience=3600)
    assert decisions(asked, AWAY, 10) == [ANEW] * 10
    assert decisions(asked, LOST[0], 3) == [ANEW, ANEW, RAISE]


def test_the_stores_own_error_is_raised_when_patience_is_over():
    with pytest.raises(errors.StoreUnavailableError):
        policy(opaque).after(AWAY)
    assert policy(non_transactional, patience=3600).after(AWAY) is RAISE


@pytest.mark.parametrize("make", [opaque, transactional, non_transactional])
def test_a_store_that_does_not_answer_a_begin_or_a_commit_is_retried(make, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    answers = iter([AWAY, AWAY, None])

    def ask() -> str:
        if (error := next(answers)) is not None:
            raise error
        return "done"

    assert policy(make, patience=3600).requests.ask(ask) == "done"


@pytest.mark.parametrize("error", DATA, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("make", [opaque, transactional])
def test_the_batchs_own_data_is_raised_at_once(make, error):
    assert policy(make).after(error) is RAISE


@pytest.mark.parametrize("error", DATA, ids=lambda error: type(error).__name__)
def test_with_quarantine_the_batchs_own_data_is_tried_once_more_and_set_aside(error):
    assert decisions(policy(opaque, sets_aside=True), error, 2) == [ANEW, ASIDE]
    assert policy(opaque, sets_aside=True, max_attempts=1).after(error) is ASIDE


@pytest.mark.parametrize("error", [Py4JError("job"), PythonException("job")], ids=["py4j", "pyspark"])
def test_with_quarantine_a_job_that_fails_in_every_attempt_is_set_aside(error):
    assert decisions(policy(opaque, sets_aside=True), error, 3) == [ANEW, ANEW, ASIDE]


@pytest.mark.parametrize("error", LOST[:2], ids=lambda error: type(error).__name__)
def test_what_the_cluster_or_the_store_did_is_never_set_aside(error):
    assert decisions(policy(opaque, sets_aside=True), error, 3) == [ANEW, ANEW, RAISE]


@pytest.mark.parametrize("error", FINAL, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("sets_aside", [False, True])
def test_what_no_attempt_can_mend_is_raised_at_once(error, sets_aside):
    assert cause_of(error) is Cause.FINAL
    assert policy(opaque, transactional, sets_aside=sets_aside).after(error) is RAISE


def test_a_query_that_was_stopped_begins_nothing_anew_and_sets_nothing_aside():
    assert policy(opaque, wanted=False).after(LOST[0]) is RAISE
    assert policy(opaque, wanted=False, sets_aside=True, max_attempts=1).after(DATA[0]) is RAISE


def test_the_state_with_the_most_attempts_counts():
    specs = [opaque("memory://", "one", max_attempts=2), opaque("memory://", "two", max_attempts=5)]
    assert RetryPolicy(specs, lambda: True).max_attempts == 5


@pytest.mark.spark
@pytest.mark.parametrize("together", [False, True])
def test_a_state_by_itself_and_states_of_a_topology_fail_alike(spark, tmp_path, together):
    """A record too large for the store: the batch's own data. It is written once, and raised."""
    frame = spark.createDataFrame([("a", 1), ("b", 2)], "user_id string, bytes bigint")
    url = f"sqlite:///{tmp_path}/state.db"
    too_large = Fail(method="multi_put", error=errors.TooLargeError, times=None)
    backend = FaultyBackend(resolve(url), str(tmp_path), (too_large,))
    stream = Topology("t").newStream("s", frame) if together else newStream("s", frame)
    job = stream.groupBy("user_id").persistentAggregate(opaque(backend, "one"), n=Count(), total=Sum("bytes"))
    if together:
        stream.persistentAggregate(opaque(url, "two"), n=Count())
    with pytest.raises(errors.TooLargeError):
        job(frame, 0)
    with open_reader(url, "one") as reader:
        ledger = reader.ledger()
    assert ledger.next_txid == ledger.first_txid + 1, "more than one attempt"


class Clock:
    """The time of `mapstate.retry` and its pauses, which only passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("mapstate.retry.time", clock)
    monkeypatch.setattr("mapstate.waiting.time", clock)
    return clock


def failing(times: int) -> Any:
    failures = [errors.StoreUnavailableError("away") for _ in range(times)]

    def ask() -> str:
        if failures:
            raise failures.pop()
        return "answer"

    return ask


def test_each_question_has_the_whole_patience(clock):
    """A begin that is retried, tasks that take longer than the patience, a commit that is retried."""
    of = policy(non_transactional, patience=60)
    assert of.requests.ask(failing(2)) == "answer"
    clock.now += 90
    assert of.requests.ask(failing(2)) == "answer"


def test_the_notes_of_a_patience_that_is_over_are_there_once(clock):
    of = policy(opaque, patience=60)
    assert of.after(errors.IncompleteBatchError("a task ran twice")) is ANEW
    with pytest.raises(errors.StoreUnavailableError) as caught:
        of.requests.ask(failing(1000))
    assert 60 <= clock.now < 61
    with pytest.raises(errors.StoreUnavailableError):
        of.after(caught.value)
    assert clock.now < 61
    assert caught.value.__notes__ == [
        "The request was retried for 60 seconds (patience).",
        "This was attempt 2; max_attempts is 3.",
    ]


def test_attempts_that_meet_a_store_that_is_away_share_one_patience(clock):
    of = policy(opaque, patience=60)

    def attempts() -> None:
        for _ in range(1000):
            assert of.requests.ask(failing(0)) == "answer"
            of.after(errors.StoreUnavailableError("away"))

    with pytest.raises(errors.StoreUnavailableError) as caught:
        attempts()
    assert 60 <= clock.now < 61
    assert "met a store that did not answer" in caught.value.__notes__[-1]


def test_a_query_that_was_stopped_is_said_to_have_retried_nothing(clock):
    of = policy(opaque, patience=60, wanted=False)
    with pytest.raises(errors.StoreUnavailableError) as caught:
        of.requests.ask(failing(1))
    assert not hasattr(caught.value, "__notes__")
