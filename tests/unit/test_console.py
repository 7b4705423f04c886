"""The console on a real terminal, in a pipe, and with a simulated clock."""

import io
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

import pytest

from samestep.loggers.console import LineConsole, ProgressEstimate, RateLimiter, join_fitting, open_console

PRELUDE = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background ignores it
from samestep.loggers.console import open_console
console = open_console(sys.stdout)
"""
TRAINING = """
console.expect(1000)
console.print("two ranks [bold] on gloo")
for step in range(1, 101):
    console.advance(step)
    if step % 10 == 0:
        record = {"train/loss": 1 / step, "lr": 3e-4, "samples_per_s": 15321.0, "memory_bytes": 1.25 * 2**30}
        console.write(step, record)
print("printed by the script")
console.write(99, {"test/accuracy": 0.75}, epoch=3, between_steps=True)
"""


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def on_terminal(script, columns=120, end=None, **variables):
    """Run a script on a pseudo-terminal, return its output and exit code; `end` is a signal sent after "ready"."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    child = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "TERM": "xterm-256color", **variables},
        start_new_session=True,
    )
    os.close(theirs)
    written = b""
    try:
        while True:
            assert select.select([ours], [], [], 120)[0], f"no output from the child in 120 s; so far: {written!r}"
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux raises when the last writer has closed
                break
            if not part:
                break
            written += part
            if end is not None and b"ready" in written:
                child.send_signal(end)
                end = None
    finally:
        os.close(ours)
        if child.poll() is None:
            child.wait(timeout=120)
    return written.decode(), child.returncode


def shown(written):
    """The text without colors and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written)


def screen(written, columns=120):
    """The lines on the screen at the end, from a minimal terminal emulator."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", written):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.startswith("\x1b"):
            if token == "\x1b[2K":
                lines[row] = ""
            elif token.endswith("A"):
                row -= int(token[2:-1] or 1)
        else:
            end = column + len(token)
            assert end <= columns, f"a line is wider than the terminal: {token!r}"
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][end:]
            column = end
    return [line.rstrip() for line in lines if line.strip()]


# Streams that refuse

PRINTING = r"""
import os, sys, warnings
warnings.simplefilter("default")
from samestep.loggers.console import open_console
{before}
console = open_console(sys.stdout)
for step in range(3):
    console.print(f"step {{step}} \u2192 caf\u00e9 \udcff")
console.write(3, {{"val/loss": 1.0}}, epoch=0, between_steps=True)
console.close({{}})
"""
TEE = """
class Tee:
    def write(self, text):
        sys.stderr.write(text)
    def flush(self):
        pass
sys.stdout = Tee()
"""
LOST = r"^<string>:\d+: SamestepWarning: standard output cannot be written: %s; training continues, and log.txt has"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "before", "out", "err"),
    [
        ("", "", "step 2 \u2192 caf\u00e9 \\udcff\n", "^$"),
        ("PYTHONIOENCODING=ascii", "", r"step 2 \u2192 caf\xe9 \udcff", "^$"),
        ("PYTHONIOENCODING=ascii:replace", "", "step 2 ? caf? ?", "^$"),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0", "", r"step 2 \u2192 caf\xe9 \udcff", "^$"),
        (">&-", "", "", "^$"),
        (">/dev/full", "", "", LOST % "the disk is full: free some space"),
        ("2>/dev/full", "", "step 2 \u2192", "^$"),
        (">/dev/full 2>&1", "", "", "^$"),
        (">&- 2>&-", "", "", "^$"),
        ("", "r, w = os.pipe(); os.close(r); os.dup2(w, 1)", "", LOST % "Broken pipe"),
        ("", "sys.stdout.close()", "", LOST % r"I/O operation on closed file\."),
        ("", TEE, "", "step 0"),
    ],
)
def test_a_stream_that_refuses_or_cannot_print_ends_nothing(shell, before, out, err):
    script = shlex.quote(PRINTING.format(before=before))
    variables, redirections = (shell, "") if "=" in shell else ("", shell)
    line = f"{variables or 'PYTHONIOENCODING=utf-8'} {shlex.quote(sys.executable)} -c {script} {redirections}"
    ended = subprocess.run(line, shell=True, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    assert out in ended.stdout.decode()
    assert re.search(err, ended.stderr.decode(errors="backslashreplace"))


def test_a_full_disk_costs_only_the_lines_that_it_refuses(tmp_path):
    """The stream is tried again with every line."""
    script = PRINTING.format(before="full = os.open('/dev/full', os.O_WRONLY); old = os.dup(1); os.dup2(full, 1)")
    script += "os.dup2(old, 1); console.print('there is space again')"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert ended.stdout.endswith("there is space again\n")
    assert ended.stderr.count("SamestepWarning") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_bar_on_a_terminal_that_cannot_print_a_character(encoding):
    written, code = on_terminal(TRAINING + r'console.print("\u2192 \udcff")', PYTHONIOENCODING=encoding)
    assert code == 0
    assert r"\u2192 \udcff" in shown(written)


def test_a_terminal_that_is_gone_ends_nothing():
    script = "ours, theirs = pty.openpty(); os.dup2(theirs, 1); os.close(theirs); os.close(ours)"
    script = f"import pty\n{PRINTING.format(before=script)}sys.exit(7)"
    environment = {**os.environ, "TERM": "xterm-256color"}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 7, ended.stderr
    assert "standard output cannot be written: Input/output error; training continues" in ended.stderr


# On a terminal


def test_a_terminal_shows_one_bar_below_all_printed_text():
    written, code = on_terminal(TRAINING + "console.close({})")
    assert code == 0
    *above, bar = screen(written)
    assert above == ["two ranks [bold] on gloo", "printed by the script", "epoch 3 | step 99 | test/accuracy 0.7500"]
    assert bar.lstrip("━╸╺ ").startswith("step 100/1,000  loss 0.0100  15,321 samples/s  ETA 0:0")
    assert bar.endswith("lr 3.0e-04  1.2 GiB")


@pytest.mark.parametrize("columns", [20, 40, 60, 80])
def test_a_narrow_terminal_shows_the_most_important_values_on_one_line(columns):
    written, code = on_terminal(TRAINING + "console.close({})", columns=columns)
    assert code == 0
    bars = [line for line in screen(written, 10**6) if "step 100" in line]
    assert len(bars) == 1
    assert len(bars[0]) <= columns
    assert ("loss 0.0100" in bars[0]) == (columns >= 40)
    assert ("15,321 samples/s" in bars[0]) == (columns >= 60)


def test_the_bar_starts_at_the_resumed_step_and_never_moves_back():
    script = """
console.expect(1000, start=900)
console.advance(950)
console.write(2, {"train/loss": 0.5, "val/loss": 0.75})
console.close({})
"""
    written, _ = on_terminal(script)
    above, bar = screen(written)
    assert above == "step 2 | train/loss 0.5000 | val/loss 0.7500"
    assert "step 950/1,000" in bar
    assert "step 2/" not in shown(written)


def test_every_evaluation_is_shown_in_order_also_within_a_second():
    script = """
console.expect(9)
for epoch in range(3):
    for step in range(3 * epoch, 3 * epoch + 3):
        console.write(step, {"train/loss": 0.5, "debug/scale": step})
    console.write(step, {"accuracy": epoch / 4}, epoch, between_steps=True)
    console.write(step, {"test/loss": 0.25}, epoch, between_steps=True)
console.close({})
"""
    written, _ = on_terminal(script)
    *above, bar = screen(written)
    assert above == [
        "step 0 | train/loss 0.5000 | debug/scale 0",
        "step 2 | train/loss 0.5000 | debug/scale 2",  # delayed, and logged before the evaluation
        "epoch 0 | step 2 | accuracy 0",
        "epoch 0 | step 2 | test/loss 0.2500",
        "step 5 | train/loss 0.5000 | debug/scale 5",
        "epoch 1 | step 5 | accuracy 0.2500",
        "epoch 1 | step 5 | test/loss 0.2500",
        "step 8 | train/loss 0.5000 | debug/scale 8",
        "epoch 2 | step 8 | accuracy 0.5000",
        "epoch 2 | step 8 | test/loss 0.2500",
    ]
    assert "step 8/9  loss 0.5000" in bar


def test_without_a_known_last_step_no_eta_is_shown():
    written, _ = on_terminal('console.write(10, {"train/loss": 0.5})\nconsole.close({})')
    (bar,) = screen(written)
    assert bar.endswith("step 10  loss 0.5000")


def test_a_console_without_records_writes_nothing():
    written, code = on_terminal("console.close({})\nconsole.close({})")
    assert (written, code) == ("", 0)


@pytest.mark.parametrize(
    "ending",
    ["console.close({})", "raise ValueError('broken')", "sys.exit(3)", "pass"],
    ids=["close", "exception", "exit", "forgotten"],
)
def test_the_terminal_is_restored_after_every_kind_of_exit(ending):
    written, code = on_terminal(TRAINING + ending)
    assert code == {"raise ValueError('broken')": 1, "sys.exit(3)": 3}.get(ending, 0)
    assert "\x1b[?25l" not in written, "the cursor was hidden"
    assert written.endswith("\n"), "the prompt would be on the line of the bar"
    if "broken" in ending:
        assert "ValueError: broken" in screen(written)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_cursor_is_visible_after_a_kill(end):
    # short naps: Python notices a signal that arrives just before a nap only when the nap is over
    written, code = on_terminal(TRAINING + "print('ready')\nwhile True: time.sleep(0.05)", end=end)
    assert code == -end
    assert "step 100/1,000" in shown(written)
    assert "\x1b[?25l" not in written


def test_a_process_forked_while_the_bar_is_shown_can_print():
    script = (
        TRAINING
        + """
import os
child = os.fork()
if not child:
    print("from the child", flush=True)
    os._exit(0)
os.waitpid(child, 0)
console.close({})
"""
    )
    written, code = on_terminal(script)
    assert code == 0
    assert "from the child" in shown(written)


def test_redirected_standard_error_is_not_captured_by_the_bar(tmp_path):
    path = tmp_path / "errors.txt"
    script = f"sys.stderr = open({str(path)!r}, 'w', buffering=1)\n" + TRAINING + "print('oops', file=sys.stderr)"
    written, _ = on_terminal(script)
    assert path.read_text() == "oops\n"
    assert "oops" not in written


def test_a_dumb_terminal_gets_plain_lines():
    written, _ = on_terminal(TRAINING + "console.close({})", TERM="dumb")
    assert "\x1b" not in written
    assert "step 100/1,000 | train/loss 0.0100 | lr 3.0e-04 | 15,321 samples/s | 1.2 GiB | ETA 0:0" in written


# In a pipe


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1"}, {"CI": "true", "TERM": "xterm"}])
def test_a_pipe_gets_plain_lines_on_standard_output(variables):
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + TRAINING + "console.close({})"],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=True,
    )
    assert done.stderr == ""
    first, record, printed, last, evaluation = done.stdout.splitlines()
    assert first == "two ranks [bold] on gloo"
    assert record.startswith("step 10/1,000 | train/loss 0.1000 | lr 3.0e-04 | 15,321 samples/s | 1.2 GiB")
    assert printed == "printed by the script"
    assert last.startswith("step 100/1,000 | train/loss 0.0100")
    assert evaluation == "epoch 3 | step 99 | test/accuracy 0.7500"


def test_lines_are_flushed_immediately():
    script = PRELUDE + 'console.print("ready"); console.write(1, {"train/loss": 0.5}); sys.stdin.read()'
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )
    assert select.select([child.stdout], [], [], 20)[0], "the line waits in a buffer"
    assert child.stdout.readline() == "ready\n"
    assert child.stdout.readline() == "step 1 | train/loss 0.5000\n"
    child.communicate()


def test_evaluations_are_lines_in_order_between_the_training_lines_that_are_due():
    clock, stream = Clock(), io.StringIO()
    console = LineConsole(stream, clock)
    for step in range(12):
        clock.now = step / 10
        console.write(step, {"train/loss": 0.5})
        if step in (2, 3):
            console.write(step, {"test/accuracy": step / 4}, epoch=step - 2, between_steps=True)
    console.write(11, {"test/f1": 0.5}, epoch=9, between_steps=True)
    console.write(11, {"test/f1": 0.75}, epoch=9, between_steps=True)
    console.close({})
    assert stream.getvalue().splitlines() == [
        "step 0 | train/loss 0.5000",
        "step 2 | train/loss 0.5000",
        "epoch 0 | step 2 | test/accuracy 0.5000",
        "step 3 | train/loss 0.5000",
        "epoch 1 | step 3 | test/accuracy 0.7500",
        "step 10 | train/loss 0.5000",
        "step 11 | train/loss 0.5000",
        "epoch 9 | step 11 | test/f1 0.5000",
        "epoch 9 | step 11 | test/f1 0.7500",
    ]


def test_one_line_per_second_and_kind_is_printed_and_always_the_last():
    clock, stream = Clock(), io.StringIO()
    console = LineConsole(stream, clock)
    for step in range(25):
        clock.now = step / 8
        console.write(step, {"train/loss": 0.5})
        if step in (1, 2):
            console.write(step, {"debug/scale": 0.5})
        if step > 2:
            console.write(step, {"train/own_loop": 0.5}, between_steps=True)  # every step of a loop without run.shard
    console.close({})
    console.close({})
    assert stream.getvalue().splitlines() == [
        "step 0 | train/loss 0.5000",
        "step 1 | debug/scale 0.5000",
        "step 3 | train/own_loop 0.5000",
        "step 8 | train/loss 0.5000",
        "step 2 | debug/scale 0.5000",  # as soon as a second is over
        "step 10 | train/own_loop 0.5000",
        "step 16 | train/loss 0.5000",
        "step 18 | train/own_loop 0.5000",
        "step 24 | train/loss 0.5000",
        "step 24 | train/own_loop 0.5000",
    ]


def test_training_lines_show_the_last_known_speed():
    clock, stream = Clock(), io.StringIO()
    console = LineConsole(stream, clock)
    for step in range(3):
        clock.now = float(step)
        console.write(step, {"train/loss": 0.5})
        if step == 1:
            console.write(step, {"train/loss": 0.5, "train/samples_per_s": 100.0})
            console.write(step, {"test/accuracy": 0.5})
    console.close({})
    assert stream.getvalue().splitlines() == [
        "step 0 | train/loss 0.5000",
        "step 1 | train/loss 0.5000",
        "step 1 | test/accuracy 0.5000",
        "step 2 | train/loss 0.5000 | 100 samples/s",
    ]


def test_a_delayed_line_is_dropped_if_a_later_one_was_shown():
    clock = Clock()
    limiter = RateLimiter(clock, interval=1.0)
    assert limiter.due(["a"], "first") == ["first"]
    assert limiter.due(["a"], "second") == []
    clock.now = 1.0
    assert limiter.due(["a"], "third") == ["third"]
    assert limiter.flush() == []


def test_a_stream_that_is_not_a_terminal_gets_plain_lines():
    stream = io.StringIO()
    console = open_console(stream)
    console.expect(10)
    console.advance(1)
    console.print("hello")
    console.close({})
    assert stream.getvalue() == "hello\n"


# The remaining time


def test_the_remaining_time_follows_the_speed_of_the_last_minute():
    clock = Clock()
    progress = ProgressEstimate(clock)
    progress.expect(1000, start=100)
    assert progress.seconds_left() is None
    clock.now = 50.0  # a slow start: one step in 50 s
    progress.advance(101)
    assert progress.seconds_left() == pytest.approx(899 * 50)
    for step in range(102, 302):
        clock.now += 1.0
        progress.advance(step)
    assert progress.seconds_left() == pytest.approx(699, rel=0.02)


def test_the_remaining_time_is_never_negative_and_needs_a_known_last_step():
    clock = Clock()
    progress = ProgressEstimate(clock)
    progress.advance(3)
    clock.now = 1.0
    progress.advance(5)
    assert progress.seconds_left() is None
    progress.expect(10, start=5)
    clock.now = 2.0
    progress.advance(12)
    assert progress.seconds_left() == 0


def test_texts_that_do_not_fit_are_dropped_from_the_end():
    texts = ["step 3", "loss 0.5", "lr 3.0e-04"]
    assert [join_fitting(texts, width) for width in (3, 15, 16, 28)] == [
        "step 3",
        "step 3",
        "step 3  loss 0.5",
        "step 3  loss 0.5  lr 3.0e-04",
    ]
