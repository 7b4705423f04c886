"""Show what runs did: read their folders, compare them, and write one HTML page that needs no network."""

from samestep.report.page import write_report
from samestep.report.run_data import RunData, read_run

__all__ = ["RunData", "read_run", "write_report"]
