"""Python runs this file when it starts below `samestep run`, which puts this folder on PYTHONPATH: it starts the probe.

The file must never break, slow down or change a process: it may be any Python program that a rank starts. So it imports
almost nothing, says nothing, and first does what Python would have done without it.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib takes longer to import
_VARIABLE = "SAMESTEP_HANG_FOLDER"  # as in samestep.hang.node_evidence
_PROBE = "samestep.hang.rank_probe"  # under its usual name, so that samestep uses the same module if it is imported


def _run_shadowed() -> None:
    """Run the sitecustomize that Python would have found, for example one of the distribution or of coverage."""
    sys.path[:] = [folder for folder in sys.path if folder != _HERE]
    own = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # pyright: ignore  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own


def _start_probe(folder: str) -> None:
    """Load the probe from its file: importing the package would import more, and may find another version of it."""
    path = os.path.join(os.path.dirname(_HERE), "rank_probe.py")  # noqa: PTH118, PTH120
    module = type(sys)(_PROBE)
    module.__file__ = path
    code = type(__loader__)(_PROBE, path).get_code(_PROBE)  # type: ignore[name-defined]  # cached as .pyc
    sys.modules[_PROBE] = module
    try:
        exec(code, module.__dict__)
        module.start(folder)
    except (OSError, AttributeError, ImportError, RuntimeError, ValueError):  # as if there were no probe
        del sys.modules[_PROBE]


if __name__ == "sitecustomize":
    try:
        _run_shadowed()
    finally:
        _folder = os.environ.get(_VARIABLE)
        if _folder and sys.platform == "linux" and sys.version_info >= (3, 11):
            _start_probe(_folder)
