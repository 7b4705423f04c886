"""A terminal for the first rank: what it prints goes to the real terminal and to its log at once.

A progress bar draws itself only on a terminal, and a log needs a file. So the rank gets a pseudo-terminal of its own,
and this thread copies what comes out of it to both.
"""

import fcntl
import os
import pty
import select
import termios
import threading
import tty
from pathlib import Path

_CHUNK = 1 << 16


class Mirror(threading.Thread):
    """Copies one pseudo-terminal to a screen and to a file, until closed."""

    def __init__(self, screen: int, log: Path) -> None:
        super().__init__(name="samestep-mirror", daemon=True)
        self._screen, self._screen_is_there = screen, True
        self._inner, self._outer = pty.openpty()
        tty.setraw(self._outer)  # the real terminal translates line ends; twice would be once too often
        self.path = os.ttyname(self._outer)
        self._log = log.open("wb", buffering=0)
        self._ending = threading.Event()
        self._copy_size()

    def run(self) -> None:
        """Copy until closed and nothing is left to read."""
        while True:
            ending = self._ending.is_set()
            ready, _, _ = select.select([self._inner], [], [], 0.0 if ending else 0.2)
            if ready:
                self._copy(os.read(self._inner, _CHUNK))
            elif ending:
                return
            else:
                self._copy_size()

    def close(self) -> None:
        """Copy what is still on its way, then give the pseudo-terminal back."""
        self._ending.set()
        self.join()
        self._log.close()
        os.close(self._inner)
        os.close(self._outer)

    def _copy(self, data: bytes) -> None:
        self._log.write(data)
        try:
            while data and self._screen_is_there:
                data = data[os.write(self._screen, data) :]
        except OSError:  # the terminal was closed; under nohup the ranks go on, and their log with them
            self._screen_is_there = False

    def _copy_size(self) -> None:
        try:
            size = fcntl.ioctl(self._screen, termios.TIOCGWINSZ, bytes(8))
        except OSError:  # closed, as above
            return
        if size != fcntl.ioctl(self._outer, termios.TIOCGWINSZ, bytes(8)):
            fcntl.ioctl(self._outer, termios.TIOCSWINSZ, size)
