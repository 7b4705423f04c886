"""The next batch is copied to the device while this one is computed: the order of reads, copies and waits."""

import gc
import weakref
from contextlib import suppress

import pytest
import torch

from samestep.training.training_data import prefetch


class Device:
    """Records what happens, in order; its copies are the batches in capital letters."""

    def __init__(self):
        self.events = []

    def read(self, batches):
        for batch in batches:
            if isinstance(batch, Exception):
                raise batch
            self.events.append(f"read {batch}")
            yield batch

    def start_copy(self, batch):
        self.events.append(f"copy {batch}")

        def finish():
            self.events.append(f"wait {batch}")
            return batch.upper()

        return finish

    def prefetch(self, *batches):
        return prefetch(self.read(batches), self.start_copy)


def test_the_copy_of_the_next_batch_starts_before_a_batch_is_used_and_the_device_waits_for_one_copy_only():
    device = Device()
    for batch in device.prefetch("a", "b", "c"):
        device.events.append(f"use {batch}")
    assert device.events == [
        *("read a", "copy a", "wait a"),
        *("read b", "copy b", "use A", "wait b"),
        *("read c", "copy c", "use B", "wait c"),
        "use C",
    ]


def test_nothing_is_read_before_the_first_batch_is_requested_and_never_more_than_one_ahead():
    device = Device()
    batches = device.prefetch("a", "b", "c", "d")
    assert device.events == []
    assert next(batches) == "A"
    assert [event for event in device.events if event.startswith("read")] == ["read a", "read b"]
    assert next(batches) == "B"
    assert [event for event in device.events if event.startswith("read")] == ["read a", "read b", "read c"]
    batches.close()


def test_a_batch_that_cannot_be_read_fails_when_it_is_requested_and_not_before():
    device = Device()
    batches = device.prefetch("a", ValueError("bad sample"))
    assert next(batches) == "A"
    with pytest.raises(ValueError, match="bad sample"):
        next(batches)
    with pytest.raises(ValueError, match="at once"):
        next(device.prefetch(ValueError("at once")))


def test_a_loop_that_is_left_waits_for_the_copy_that_it_does_not_use():
    device = Device()
    batches = device.prefetch("a", "b", "c")
    next(batches)
    batches.close()
    assert device.events[-2:] == ["copy b", "wait b"]


def test_a_loop_that_is_left_does_not_raise_the_error_of_a_batch_that_it_does_not_use():
    batches = Device().prefetch("a", ValueError("bad sample"))
    assert next(batches) == "A"
    batches.close()


class UnreadableError(Exception):
    """An error that can be referred to weakly."""


def test_after_a_failed_read_neither_the_error_nor_the_batch_before_it_waits_for_the_garbage_collector():
    references = []

    def read():
        yield torch.ones(2)
        error = UnreadableError()
        references.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    def start_copy(batch):
        copied = batch.clone()
        references.append(weakref.ref(copied))
        return lambda: copied

    gc.collect()
    gc.disable()
    try:
        batches = prefetch(read(), start_copy)
        for _ in range(2):
            with suppress(UnreadableError):
                next(batches)
        alive = [reference() is not None for reference in references]
    finally:
        gc.enable()
    assert alive == [False, False]
