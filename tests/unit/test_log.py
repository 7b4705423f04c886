"""How the library speaks: warnings that point at the user's line, and notes that someone must listen to."""

import doctest
import logging
import types
import warnings

import pytest

import samestep.log
import samestep.sinks.console
import samestep.sinks.readable
import samestep.sinks.values
import samestep.units
from samestep.log import SamestepWarning, Voice, note, notes_to, warn


def test_a_warning_points_at_the_line_outside_the_library():
    inner = types.ModuleType("samestep.somewhere")
    exec("from samestep.log import warn\ndef deep(text):\n    warn(text)\n", inner.__dict__)
    with pytest.warns(SamestepWarning, match="two ranks share a GPU") as given:
        inner.deep("two ranks share a GPU")
    assert given[0].filename == __file__


def test_a_warning_is_a_warning_of_ours():
    with pytest.warns(SamestepWarning, match="as it is"):
        warn("as it is")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamestepWarning)
        warn("silenced")


def test_once_is_once_for_each_voice():
    first, second = Voice(), Voice()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for voice in (first, first, second):
            voice.warn_once("said before")
        first.warn_once("another")
    assert [str(warning.message) for warning in given] == ["said before", "said before", "another"]
    assert {warning.filename for warning in given} == {__file__}


def test_notes_go_where_someone_listens_and_nowhere_else(capsys):
    heard = []
    note("nobody listens")
    with notes_to(heard.append):
        note("50 % done")
        with notes_to(heard.append):
            note("twice")
    note("nobody listens again")
    assert heard == ["50 % done", "twice", "twice"]
    assert capsys.readouterr() == ("", "")


def test_the_users_own_logging_hears_notes_and_is_left_as_it_was(caplog):
    logger = logging.getLogger("samestep")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with caplog.at_level(logging.INFO):
        note("for the user's log")
        with notes_to(lambda text: None):
            note("for us")
    assert caplog.messages == ["for the user's log"]
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


@pytest.mark.parametrize(
    "module",
    [
        samestep.log,
        samestep.units,
        samestep.sinks.readable,
        samestep.sinks.values,
        samestep.sinks.console,
    ],
    ids=lambda module: module.__name__,
)
def test_examples_in_the_documentation_run(module):
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0
