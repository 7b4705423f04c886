"""Start the ranks of a job on this node or on SLURM, watch them, and report failures."""

import inspect
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """This package has the name of the function `samestep.launch`, so calling the package calls the function.

    To assign the class of a module is documented in Python's data model, "Customizing module attribute access".
    """

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Start ranks; see `samestep.launch.python_launch.launch`."""
        from samestep.launch.python_launch import launch

        return launch(*arguments, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the function, for `help` and for editors."""
        from samestep.launch.python_launch import launch

        return inspect.signature(launch)


sys.modules[__name__].__class__ = _CallablePackage
