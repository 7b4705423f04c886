"""The exception tree: every error a user can meet derives from SamestepError; and the exit codes of ranks."""

PREEMPTED = 75
"""Exit code of ranks that were stopped by a signal or a time limit and have saved (EX_TEMPFAIL): they can resume."""
STOPPED = 143
"""Exit code of ranks that were stopped by a signal and had nothing to save, as a shell reports SIGTERM."""
OUT_OF_MEMORY = 76
"""Exit code of ranks that ran out of memory in their first steps: half the micro-batch may fit."""
TIME_LIMIT_REACHED = 124
"""Exit code of the launcher if it killed ranks at the time limit, as timeout(1) has it."""


class SamestepError(Exception):
    """The base class. The message says what is wrong, with the values, and what to do."""


class ConfigError(SamestepError):
    """An argument of Run(...) is not valid, or not supported by the hardware."""


class WorldError(SamestepError):
    """The environment variables do not describe a valid world: some are missing or contradict each other."""


class LaunchError(SamestepError):
    """The ranks cannot be started with these options."""


class RankFailed(SamestepError):
    """A rank of `samestep.launch` has ended without a value and without an exception; the message is the report."""


class DataError(SamestepError):
    """A dataset, stream or file cannot be partitioned exactly."""


class SampleError(DataError):
    """A sample cannot be read; the message names its index, the rank and the worker."""


class StateError(DataError):
    """A saved data position does not belong to this dataset or this global batch size."""


class LedgerError(DataError):
    """A ledger cannot be read."""


class StepError(SamestepError):
    """A step was used in a way that does not give the mean over the global batch."""


class PlanError(SamestepError):
    """No plan can be made: an unknown cluster, a model that cannot be traced, or nothing fits."""


class MeasurementTooSlow(PlanError):
    """A step cannot be traced, and real micro-batches take too long on the CPU; the message states a lower bound."""


class WrapError(SamestepError):
    """A model cannot be wrapped, or was changed after it was wrapped."""


class CommunicationError(SamestepError):
    """A run was used in a way that its ranks cannot agree on: different calls or arguments, or a call out of order."""


class RankMissing(CommunicationError):
    """A rank did not reach a collective that all ranks must call."""


class OnceFailed(CommunicationError):
    """A function run by `run.once` raised an exception that cannot be pickled; the message holds its traceback."""


class ReplicasDiffer(CommunicationError):
    """Ranks hold different weights although they must be equal."""


class CheckpointError(SamestepError):
    """A checkpoint cannot be written or read, or does not belong to this run."""


class TeacherError(SamestepError):
    """A teacher cannot be built, loaded or placed, or did not answer."""


class LogError(SamestepError):
    """A value cannot be logged, or a log file cannot be written."""


class ReportError(SamestepError):
    """The folder of a run cannot be read."""
