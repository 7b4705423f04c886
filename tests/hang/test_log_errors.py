"""Why a rank failed, as the end of its log says."""

import pytest

from samestep.hang.log_errors import has_timed_out, is_lost_peer, traceback_frame

C10D = "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("file", "message", "expected"),
    [
        ("a.py", "torch.distributed.DistNetworkError: x", True),
        ("a.py", "samestep.errors.RankMissing: rank 0 waits", True),
        ("a.py", "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:7051: Connection reset by peer", True),
        ("a.py", "torch.distributed.DistBackendError: NCCL error: Connection refused", True),
        (C10D, "RuntimeError: Broken pipe", True),
        ("a.py", "ConnectionResetError: [Errno 104] Connection reset by peer", False),
        ("a.py", "BrokenPipeError: [Errno 32] Broken pipe", False),
        ("/torch/distributed/checkpoint/filesystem.py", "RuntimeError: upload: Connection reset by peer", False),
        ("/torch/distributed/distributed_c10d.py", "ValueError: x", False),
    ],
)
def test_a_lost_peer_is_recognized_by_a_message_of_torch_distributed(file: str, message: str, expected: bool):
    frames = f'  File "b.py", line 1, in main\n  File "{file}", line 2, in call\n    source\n'
    traceback = f"Traceback (most recent call last):\n{frames}{message}"
    assert is_lost_peer(traceback) is expected
    assert is_lost_peer("\n".join(f"[rank0]: {line}" for line in traceback.splitlines())) is expected
    assert is_lost_peer(f"{traceback}\n/x.py:3: UserWarning: leaked\n  warnings.warn('leaked')") is expected


def test_a_lost_data_worker_is_not_a_lost_peer():
    """torch notices that a data worker was killed while it receives a batch."""
    frames = (
        '  File "/python3.11/multiprocessing/connection.py", line 395, in _recv\n    chunk = read(handle, remaining)'
    )
    message = "ConnectionResetError: [Errno 104] Connection reset by peer"
    assert not is_lost_peer(f"Traceback (most recent call last):\n{frames}\n{message}")


def test_words_in_a_source_line_do_not_count_as_a_lost_peer():
    assert not is_lost_peer(
        'Traceback (most recent call last):\n  File "a.py"\n    print("Broken pipe")\nValueError: mine'
    )


def test_the_line_of_a_crash_is_not_that_of_an_earlier_traceback():
    earlier = ["Traceback (most recent call last):", '  File "/job/train.py", line 4, in work', "ValueError: mine"]
    crash = [
        "Fatal Python error: Aborted",
        "",
        "Thread 0x1 (most recent call first):",
        '  File "/job/train.py", line 10 in main',
    ]
    for lines, line in ((earlier, 4), ([*earlier, *crash], 10)):
        frame = traceback_frame(lines)
        assert frame is not None
        assert (frame.file, frame.line) == ("/job/train.py", line)


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 5000ms for recv operation",
        "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
        "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//0",
        "RuntimeError: Rank 0 failed to pass monitoredBarrier in 5000 ms",
        "samestep.errors.RankMissing: rank 0 has waited at train.py:7 for 25 s, because 1 rank(s) have not",
        "samestep.errors.RankMissing: rank 0 waits in mean at train.py:7 since 300 s: rank 1 was last in barrier",
    ],
)
def test_a_rank_that_waited_until_the_timeout_is_recognized_by_its_exception(message: str):
    traceback = f'Traceback (most recent call last):\n  File "train.py", line 7, in main\n    step()\n{message}'
    assert has_timed_out(traceback)
    other = traceback.replace("step()", "pass").replace(message, "ValueError: mine")
    assert not has_timed_out(other)
    assert not has_timed_out(traceback.replace("step()", message).replace(f"\n{message}", "\nValueError: mine", 1))


def test_the_watchdog_of_nccl_writes_before_the_stacks_of_python():
    crash = 'Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File "train.py", line 7 in main'
    watchdog = "[rank2]:[E1116 10:00:00 ProcessGroupNCCL.cpp:632] Watchdog caught collective operation timeout"
    assert has_timed_out(f"{watchdog}\n{crash}")
    assert not has_timed_out(crash)
