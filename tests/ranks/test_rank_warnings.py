"""Warnings of any library while a run is open: each once, on rank 0, and a count of the repetitions."""

import io
import logging
import warnings
from contextlib import redirect_stderr, redirect_stdout

import pytest

from samestep import Run


def library(text):
    """A library that changes the filters, after which Python forgets what it has shown."""
    warnings.filterwarnings("ignore", "something else")
    warnings.warn(text, UserWarning, stacklevel=1)


def warn_in_every_epoch(folder):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err, warnings.catch_warnings():
        warnings.simplefilter("default")
        with Run(global_batch=4, folder=folder) as run:
            for epoch in range(3):
                library("the scheduler is called first")
                library(f"epoch {epoch}")
                if run.rank == 1:
                    library("rank 1 has no cache")
        library("the scheduler is called first")  # after the run Python's own rules hold again
        return out.getvalue(), err.getvalue()


def shown(text):
    return [line.partition("UserWarning: ")[2] for line in text.splitlines() if "UserWarning: " in line]


def test_a_warning_is_shown_once_on_rank_0_and_its_repetitions_are_counted(ranks, tmp_path):
    (out, err), (other_out, other_err) = ranks(2, warn_in_every_epoch, tmp_path)
    again = "the scheduler is called first"
    assert shown(err) == [again, "epoch 0", "epoch 1", "epoch 2", again]
    assert shown(other_err) == ["rank 1 has no cache", again]  # what rank 0 did not meet
    line = library.__code__.co_firstlineno + 3
    assert out.splitlines()[-1] == f"repeated warnings, shown once: UserWarning at {__file__}:{line} (2 more)"
    assert other_out == ""


def test_a_single_rank_shows_each_warning_once(ranks, tmp_path):
    ((out, err),) = ranks(1, warn_in_every_epoch, tmp_path)
    assert len(shown(err)) == 5
    assert out.count("(2 more)") == 1


def warn_as_an_error():
    with Run(global_batch=4):
        for _ in range(2):
            with pytest.raises(UserWarning, match="an error"):
                library("an error")
    return warnings.showwarning.__module__


def test_a_filter_that_turns_warnings_into_errors_is_untouched(ranks):
    assert ranks(2, warn_as_an_error) == ["warnings", "warnings"]


def record_inside():
    with Run(global_batch=4), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library("twice")
        library("twice")
    return len(caught)


def test_recorded_warnings_are_complete(ranks):
    assert ranks(2, record_inside) == [2, 2]


def close_inside_of_a_filter_block():
    run = Run(global_batch=4).start()
    with warnings.catch_warnings():
        run.close()
    with redirect_stderr(io.StringIO()) as err, warnings.catch_warnings():
        warnings.simplefilter("always")
        library("after the run")
        library("after the run")
    return shown(err.getvalue())


def test_nothing_is_hidden_after_the_run(ranks):
    assert ranks(1, close_inside_of_a_filter_block) == [["after the run"] * 2]


def warn_with_logging():
    logging.captureWarnings(True)
    handler, records = logging.Handler(), []
    handler.emit = records.append
    logging.getLogger("py.warnings").addHandler(handler)
    try:
        with warnings.catch_warnings(), Run(global_batch=4):
            warnings.simplefilter("always")
            library("to the log")
            library("to the log")
    finally:
        logging.captureWarnings(False)
        logging.getLogger("py.warnings").removeHandler(handler)
    return len(records)


def test_captured_warnings_go_to_the_log_once(ranks):
    assert ranks(1, warn_with_logging) == [1]
