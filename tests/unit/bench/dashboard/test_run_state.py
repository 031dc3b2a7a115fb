from tests.unit.bench.dashboard.script import batch_run, events, http_run, http_step, step_events
from tgi_cli.bench.dashboard.run_state import LIVE_REQUESTS, RunState
from tgi_cli.bench.events import RunEnded, StepFailed, StepProgress, StepStarted


def told(run_state, happened):
    for event in happened:
        run_state.apply(event)
    return run_state


def test_a_live_run_ends_as_the_saved_run_is_opened() -> None:
    run = http_run()
    live, saved = told(RunState(), events(run)), RunState.of(run)
    assert [step.record for step in live] == [step.record for step in saved] == run.steps
    assert (live.run, live.total, live.done, live.running) == (run, 3, 3, None)
    assert [step.label for step in saved] == ["Clients: 1", "Clients: 4", "Clients: 16"]
    assert [step.bad for step in saved] == [False, False, True]


def test_progress_of_a_step_by_count_by_time_and_unknown() -> None:
    record = batch_run().steps[1]
    run_state = told(RunState(), step_events(1, 6, record, upto=5))
    assert run_state.running is not None
    assert run_state.running.share == 5 / 11
    run_state.running.step = record.step.__class__(
        kind="rate", value=2.0, label="2/s", seconds=10.0
    )
    run_state.apply(StepProgress(1, 3, 0, 2.5, 1, 0, 1.0))
    assert run_state.running.share == 0.25
    run_state.running.step = record.step.__class__(kind="rate", value=2.0, label="2/s")
    assert run_state.running.share is None


def test_errors_are_counted_and_the_latest_is_shown() -> None:
    record = http_step(16)
    refused = [request for request in record.requests[:20] if request.error]
    run_state = told(RunState(), step_events(0, 1, record, upto=20))
    assert run_state.errors == run_state.steps[0].request_errors == len(refused) > 1
    newest = refused[-1].index
    assert run_state.error == f"Clients: 16: request {newest}: http 429: Model is overloaded"
    run_state.apply(StepFailed(0, "the batch did not fit"))
    assert run_state.error == "Clients: 16: the batch did not fit"
    assert run_state.fatal is None
    run_state.apply(StepFailed(0, "the load generator died", "look at its log", fatal=True))
    assert run_state.fatal == ("Clients: 16: the load generator died", "look at its log")
    assert run_state.bad


def test_a_failure_before_the_first_step_is_shown() -> None:
    run_state = told(RunState(), [StepFailed(0, "nothing answers", fatal=True)])
    assert run_state.fatal == ("nothing answers", "")
    assert list(run_state) == []


def test_a_search_has_no_total() -> None:
    run = http_run()
    run_state = RunState()
    for index, record in enumerate(run.steps[:2]):
        told(run_state, step_events(index, 0, record))
    assert (run_state.total, run_state.done) == (0, 2)
    run_state.apply(RunEnded(run))
    assert (run_state.total, run_state.done) == (3, 3)  # a step it was never told of is in the run


def test_a_running_step_is_shown_by_its_latest_requests_only() -> None:
    record = http_step(4, requests=LIVE_REQUESTS + 50)
    run_state = told(RunState(), step_events(0, 1, record, upto=LIVE_REQUESTS + 50))
    snapshot = run_state.steps[0].snapshot()
    assert snapshot.requests == record.requests[50:]
    span = max(r.finished for r in snapshot.requests) - min(r.scheduled for r in snapshot.requests)
    assert snapshot.duration == span
    told(run_state, [*step_events(0, 1, record)][-1:])
    assert len(run_state.steps[0].snapshot().requests) == LIVE_REQUESTS + 50


def test_events_of_unknown_steps_change_nothing() -> None:
    run = batch_run()
    run_state = told(
        RunState(),
        [event for event in events(run, ended=False) if not isinstance(event, StepStarted)],
    )
    assert list(run_state) == []
