"""`samestep.launch` in a real notebook: a kernel runs its cells, as Jupyter does."""

import asyncio
import os
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from tests.e2e.pages import REPOSITORY, fences
from tests.launch.launched import IMPORT_PATH, MARK, variable, wait_for

pytestmark = [
    pytest.mark.slow,
    # of the libraries that run the kernel
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# The kernel also holds what must not reach the ranks: an event loop, threads, and sockets that cannot be pickled.
DEFINE = """
import samestep

class SampleLost(ValueError):
    pass

class Scores:
    def __init__(self, total):
        self.total = total

scale = 2
"""

TRAIN = """
def train(base):
    import time
    from pathlib import Path
    from samestep import Run

    with Run(global_batch=4) as run:
        print(f"rank {run.rank} waits for the reader of this line", flush=True)
        while run.is_main and not Path("seen").exists():
            time.sleep(0.05)
        return Scores(scale * run.sum(base + run.rank))

scores = samestep.launch(train, 10, nproc=2)
assert isinstance(scores, Scores)
scores.total
"""

FAIL = """
def lose_sample():
    import os
    import time
    if os.environ["RANK"] == "1":
        raise SampleLost("sample 7 is lost")
    time.sleep(300)

try:
    samestep.launch(lose_sample, nproc=2)
except SampleLost as error:
    print("caught", repr(error))
    raise
"""

WAIT = """
def wait():
    import time
    print("rank 0 sleeps", flush=True)
    time.sleep(300)

samestep.launch(wait, nproc=2)
"""


class Client(NotebookClient):
    """Acts on what a cell prints while it runs."""

    def output(self, outs, msg, display_id, cell_index):
        """Called for every output message of the kernel."""
        text = msg["content"].get("text", "")
        if "waits for the reader of this line" in text:
            Path(self.resources["metadata"]["path"], "seen").touch()
        if "rank 0 sleeps" in text:
            self.interrupting = asyncio.ensure_future(self.km.interrupt_kernel())
        return super().output(outs, msg, display_id, cell_index)


def run_cells(folder: Path, *cells: str) -> list[list[dict]]:
    """Run a notebook with these cells; return the outputs of each."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(folder)}}
    client = Client(notebook, kernel_name="python3", timeout=150, allow_errors=True, resources=resources)
    environ = {**os.environ, **IMPORT_PATH, MARK: str(folder), "IPYTHONDIR": str(folder / "ipython")}
    client.execute(env=environ)
    wait_for(lambda: not running(folder), 60, lambda: f"left: {running(folder)}")
    return [cell["outputs"] for cell in notebook.cells]


def running(folder: Path) -> list[psutil.Process]:
    return [each for each in psutil.process_iter() if variable(each, MARK) == str(folder)]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """Keep the files of Jupyter out of the home directory, and share the result of the bfloat16 probe."""
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    yield
    for each in running(tmp_path):
        each.kill()


def text_of(outputs: list[dict], name: str) -> str:
    return "".join(output["text"] for output in outputs if output.get("name") == name)


def test_functions_of_a_notebook_run_on_ranks(tmp_path):
    _, trained, failed, interrupted = run_cells(tmp_path, DEFINE, TRAIN, FAIL, WAIT)

    assert trained[-1].get("data", trained[-1]) == {"text/plain": "42"}
    assert text_of(trained, "stdout") == "rank 0 waits for the reader of this line\n", "this line came while it ran"
    assert "samestep: logs in" in text_of(trained, "stderr")

    assert text_of(failed, "stdout") == "caught SampleLost('sample 7 is lost')\n"
    assert (failed[-1]["ename"], failed[-1]["evalue"]) == ("SampleLost", "sample 7 is lost")
    shown = "\n".join(failed[-1]["traceback"])
    assert "raised on rank 1 in samestep.launch(lose_sample)" in shown
    assert 'line 5, in lose_sample\n    raise SampleLost("sample 7 is lost")' in shown, "with the source of the cell"

    assert interrupted[-1]["ename"] == "KeyboardInterrupt"


def test_the_cells_of_the_page_run(tmp_path):
    page = (REPOSITORY / "docs" / "notebooks.md").read_text()
    cells = [block.text for block in fences(page) if block.language == "python"]
    assert len(cells) == 2

    *_, compared = run_cells(tmp_path, cells[0], "first = loss", cells[1], "abs(first - loss) < 1e-6, loss < 2.3")

    assert compared[-1].get("data", compared[-1]) == {"text/plain": "(True, True)"}
