"""Run any script on one and on several ranks, compare what happened, and name the faults."""

from samestep.findings import Finding, Location
from samestep.verify.verification import Verdict, verify
from samestep.verify.worlds import Interpreters

__all__ = ["Finding", "Interpreters", "Location", "Verdict", "verify"]
