"""The stacks that faulthandler writes to a file in memory, and how they are read."""

from samestep.hang import rank_probe
from samestep.hang.evidence import Frame
from samestep.hang.process_stacks import StackFile, parse_stacks
from tests.hang.probed import ENDLESS, place
from tests.launch.launched import wait_for

PYTHON_3_11 = """Thread 0x00007f68 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/home/me/caf\\xe9 \\u4e2d.py", line 3 in <lambda>

Thread 0x00007f67 (most recent call first):
  <no Python frame>

Current thread 0x00007f69 (most recent call first):
  Garbage-collecting
  File "train.py", line 7 in f
  File ???, line ??? in ???
  File "<string>", line 1 in <module>
  ...
"""


PYTHON_3_14 = """Thread 0x00007f68 [QueueFeeder [1]] (most recent call first):
  File "/usr/lib/python3.14/threading.py", line 327 in wait

Current thread 0x00007f69 [python] (most recent call first):
  File "/home/me/train.py", line 7 in f

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3.14", at _Py_DumpStack+0x48 [0x5]
  File "/home/me/not_python.py", line 7 in f

Extension modules: numpy, torch (total: 2)
"""


def test_stacks_of_python_3_11():
    assert parse_stacks(PYTHON_3_11, "0x7f69", "/home/me") == {
        "thread 0x7f68": [
            Frame("/usr/lib/python3.11/threading.py", 327, "wait"),
            Frame("/home/me/café 中.py", 3, "<lambda>"),
        ],
        "thread 0x7f67": [],
        "main": [Frame("/home/me/train.py", 7, "f"), Frame("<string>", 1, "<module>")],
    }


def test_stacks_of_python_3_14():
    assert parse_stacks(PYTHON_3_14, "0x7f69") == {
        "QueueFeeder [1] 0x7f68": [Frame("/usr/lib/python3.14/threading.py", 327, "wait")],
        "main": [Frame("/home/me/train.py", 7, "f")],
    }


def test_the_stack_of_one_thread():
    text = 'Stack (most recent call first):\n  File "train.py", line 7 in f\n'
    assert parse_stacks(text, "0x7f69", "/home/me") == {"main": [Frame("/home/me/train.py", 7, "f")]}


def test_a_text_that_is_incomplete_or_not_of_faulthandler():
    assert parse_stacks("") == {}
    assert parse_stacks("Fatal Python error: Aborted\n\nlost") == {}
    half = PYTHON_3_11[: PYTHON_3_11.index("line 7")]
    assert parse_stacks(half, "0x7f69")["main"] == []


def stack_file(pid):
    return StackFile(pid)._path.read_text()


def test_only_what_is_new_in_the_file_of_stacks_is_read(processes):
    process = processes.start(f"import re\nready()\n{ENDLESS}")
    wait_for(lambda: "Thread" in stack_file(process.pid) or process.send_signal(rank_probe.SIGNAL), 120)
    file = StackFile(process.pid)
    assert file.read() is False
    assert (file._text, file.stacks) == ("", {})
    process.send_signal(rank_probe.SIGNAL)
    wait_for(file.read, 120)
    assert file._text.count("Current thread") == 1
    assert place(file.stacks["main"]) == "script0.py:4 <module>"
