"""Warnings that point at the user's line, info messages of the logger "samestep", and the examples in docstrings."""

import doctest
import logging
import types
import warnings

import pytest

import samestep.disk
import samestep.loggers.console
import samestep.loggers.loggers
import samestep.loggers.run_files
import samestep.messages
from samestep.messages import SamestepWarning, WarnOnce, info, info_to, warn


def test_a_warning_points_at_the_caller_outside_of_samestep():
    inner = types.ModuleType("samestep.somewhere")
    exec("from samestep.messages import warn\ndef deep(text):\n    warn(text)\n", inner.__dict__)
    with pytest.warns(SamestepWarning, match="two ranks share a GPU") as caught:
        inner.deep("two ranks share a GPU")
    assert caught[0].filename == __file__


def test_warnings_have_their_own_category():
    with pytest.warns(SamestepWarning, match="a message"):
        warn("a message")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamestepWarning)
        warn("silenced")


def test_warn_once_warns_once_per_instance():
    first, second = WarnOnce(), WarnOnce()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for instance in (first, first, second):
            instance.warn_once("repeated")
        first.warn_once("another")
    assert [str(warning.message) for warning in caught] == ["repeated", "repeated", "another"]
    assert {warning.filename for warning in caught} == {__file__}


def test_info_messages_are_printed_only_inside_info_to(capsys):
    received = []
    info("before the block")
    with info_to(received.append):
        info("50 % done")
        with info_to(received.append):
            info("twice")
    info("after the block")
    assert received == ["50 % done", "twice", "twice"]
    assert capsys.readouterr() == ("", "")


def test_the_users_logging_receives_info_messages_and_its_settings_are_restored(caplog):
    logger = logging.getLogger("samestep")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with caplog.at_level(logging.INFO):
        info("for the user's log")
        with info_to(lambda text: None):
            info("for info_to")
    assert caplog.messages == ["for the user's log"]
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


@pytest.mark.parametrize(
    "module",
    [
        samestep.messages,
        samestep.disk,
        samestep.loggers.run_files,
        samestep.loggers.loggers,
        samestep.loggers.console,
    ],
    ids=lambda module: module.__name__,
)
def test_examples_in_docstrings_run(module):
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0
