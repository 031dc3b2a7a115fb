from tests.unit.bench.dashboard.script import batch_run, events, http_run, http_step, step_events
from tgi_cli.bench.dashboard.run_state import LIVE_REQUESTS, RunState
from tgi_cli.bench.events import RunEnded, StepFailed, StepProgress, StepStarted


def told(board, happened):
    for event in happened:
        board.apply(event)
    return board


def test_a_live_run_ends_as_the_saved_run_is_opened() -> None:
    run = http_run()
    live, saved = told(RunState(), events(run)), RunState.of(run)
    assert [step.record for step in live] == [step.record for step in saved] == run.steps
    assert (live.run, live.total, live.done, live.running) == (run, 3, 3, None)
    assert [step.label for step in saved] == ["Clients: 1", "Clients: 4", "Clients: 16"]
    assert [step.bad for step in saved] == [False, False, True]


def test_progress_of_a_step_by_count_by_time_and_unknown() -> None:
    record = batch_run().steps[1]
    board = told(RunState(), step_events(1, 6, record, upto=5))
    assert board.running is not None
    assert board.running.share == 5 / 11
    board.running.step = record.step.__class__(kind="rate", value=2.0, label="2/s", seconds=10.0)
    board.apply(StepProgress(1, 3, 0, 2.5, 1, 0, 1.0))
    assert board.running.share == 0.25
    board.running.step = record.step.__class__(kind="rate", value=2.0, label="2/s")
    assert board.running.share is None


def test_errors_are_counted_and_the_newest_is_told() -> None:
    record = http_step(16)
    refused = [request for request in record.requests[:20] if request.error]
    board = told(RunState(), step_events(0, 1, record, upto=20))
    assert board.errors == board.steps[0].request_errors == len(refused) > 1
    newest = refused[-1].index
    assert board.error == f"Clients: 16: request {newest}: http 429: Model is overloaded"
    board.apply(StepFailed(0, "the batch did not fit"))
    assert board.error == "Clients: 16: the batch did not fit"
    assert board.fatal is None
    board.apply(StepFailed(0, "the load generator died", "look at its log", fatal=True))
    assert board.fatal == ("Clients: 16: the load generator died", "look at its log")
    assert board.bad


def test_a_failure_before_the_first_step_is_told() -> None:
    board = told(RunState(), [StepFailed(0, "nothing answers", fatal=True)])
    assert board.fatal == ("nothing answers", "")
    assert list(board) == []


def test_a_search_whose_end_is_not_known() -> None:
    run = http_run()
    board = RunState()
    for index, record in enumerate(run.steps[:2]):
        told(board, step_events(index, 0, record))
    assert (board.total, board.done) == (0, 2)
    board.apply(RunEnded(run))
    assert (board.total, board.done) == (3, 3)  # a step it was never told of is in the run


def test_a_running_step_is_shown_by_its_latest_requests_only() -> None:
    record = http_step(4, requests=LIVE_REQUESTS + 50)
    board = told(RunState(), step_events(0, 1, record, upto=LIVE_REQUESTS + 50))
    snapshot = board.steps[0].snapshot()
    assert snapshot.requests == record.requests[50:]
    span = max(r.finished for r in snapshot.requests) - min(r.scheduled for r in snapshot.requests)
    assert snapshot.duration == span
    told(board, [*step_events(0, 1, record)][-1:])
    assert len(board.steps[0].snapshot().requests) == LIVE_REQUESTS + 50


def test_events_of_steps_that_nobody_began_change_nothing() -> None:
    run = batch_run()
    board = told(
        RunState(),
        [event for event in events(run, ended=False) if not isinstance(event, StepStarted)],
    )
    assert list(board) == []
