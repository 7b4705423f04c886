"""How the library speaks: warnings that point at the user's line, and notes that someone must listen to."""

import doctest
import logging
import types
import warnings

import pytest
import samestep.log
import samestep.units

import samestep.loggers.console
import samestep.loggers.loggers
import samestep.loggers.text_log
from samestep.messages import SamestepWarning, WarnOnce, info, info_to, warn


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
    first, second = WarnOnce(), WarnOnce()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for voice in (first, first, second):
            voice.warn_once("said before")
        first.warn_once("another")
    assert [str(warning.message) for warning in given] == ["said before", "said before", "another"]
    assert {warning.filename for warning in given} == {__file__}


def test_notes_go_where_someone_listens_and_nowhere_else(capsys):
    heard = []
    info("nobody listens")
    with info_to(heard.append):
        info("50 % done")
        with info_to(heard.append):
            info("twice")
    info("nobody listens again")
    assert heard == ["50 % done", "twice", "twice"]
    assert capsys.readouterr() == ("", "")


def test_the_users_own_logging_hears_notes_and_is_left_as_it_was(caplog):
    logger = logging.getLogger("samestep")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with caplog.at_level(logging.INFO):
        info("for the user's log")
        with info_to(lambda text: None):
            info("for us")
    assert caplog.messages == ["for the user's log"]
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


@pytest.mark.parametrize(
    "module",
    [
        samestep.log,
        samestep.units,
        samestep.loggers.text_log,
        samestep.loggers.loggers,
        samestep.loggers.console,
    ],
    ids=lambda module: module.__name__,
)
def test_examples_in_the_documentation_run(module):
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0
