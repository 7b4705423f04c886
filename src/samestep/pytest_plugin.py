"""The pytest fixture `assert_same_step`, which fails a test with the findings of `samestep verify`.

pytest imports this module at the start of every run in an environment with samestep, so it imports nothing else until a
test uses the fixture. It is not a module of `samestep.verify`, whose import takes longer than the start of pytest.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from samestep.verify import Interpreters, Verdict


class AssertSameStep:
    """Verifies scripts; a test gets one from the fixture of the same name."""

    def __init__(self, interpreters: "Interpreters") -> None:
        self._interpreters = interpreters

    def __call__(
        self,
        script: str | os.PathLike[str],
        *arguments: str,
        nproc: int = 2,
        steps: int = 100,
        strict: bool = False,
        timeout: float = 300.0,
        module: bool = False,
    ) -> "Verdict":
        """Run a script as `samestep verify` does, and raise AssertionError if something is wrong with it.

        The path of the script is relative to the current folder. The text of the error has the findings as the command
        prints them. Returns what was compared.

        Args:
            script: A Python file, or with `module` the name of a module.
            arguments: The arguments of the script.
            nproc: The number of ranks to compare with one.
            steps: Optimizer steps after which to stop the script, at the end of an epoch.
            strict: Also report choices that are legitimate but depend on the number of ranks.
            timeout: Seconds for everything.
            module: Whether `script` is the name of a module, as in `python -m`.

        """
        __tracebackhide__ = True  # the report of pytest ends at the line of the test
        from samestep.findings import count_findings, format_findings
        from samestep.launch.job import check_target
        from samestep.verify import verify

        check_target(str(script), module)
        verdict = verify(
            script, arguments, module=module, nproc=nproc, steps=steps, strict=strict, timeout=timeout,
            interpreters=self._interpreters,
        )  # fmt: skip
        if verdict.failure:
            raise AssertionError(f"could not verify {script}: {verdict.failure}\n{verdict.output}".rstrip())
        if verdict.findings:
            found = f"{count_findings(verdict.findings)} found in {script}"
            raise AssertionError(f"{found}\n\n{format_findings(verdict.findings)}")
        return verdict


@pytest.fixture(scope="session")
def _samestep_interpreters() -> "Iterator[Interpreters]":
    """Processes that have imported torch, for all tests that verify a script."""
    from samestep.verify import Interpreters

    with Interpreters() as interpreters:
        yield interpreters


@pytest.fixture
def assert_same_step(_samestep_interpreters: "Interpreters") -> AssertSameStep:
    """Verify a script: `assert_same_step("train.py", "--epochs", "2")` fails the test if something is wrong with it.

    Keyword options are `nproc`, `steps`, `strict`, `timeout` and `module`.
    """
    return AssertSameStep(_samestep_interpreters)
