"""Every error a user can meet, as one tree under SamestepError."""


class SamestepError(Exception):
    """Something that samestep noticed: the message says what is, what should be and what to type."""


class WorldError(SamestepError):
    """The environment does not describe a world: variables are missing or contradict each other."""


class LaunchError(SamestepError):
    """Ranks could not be started as asked."""


class DataError(SamestepError):
    """A dataset, a stream or a file that cannot be split exactly."""


class SampleError(DataError):
    """One sample could not be read; the message names its index, the rank and the worker."""


class StateError(DataError):
    """A saved position does not belong to this data or this global batch."""


class LedgerError(DataError):
    """A ledger cannot be read, or is not one."""


class StepError(SamestepError):
    """A step was used in a way that would not give the mean over the global batch."""


class PlanError(SamestepError):
    """No plan can be made: machines that nobody knows, a model that cannot be looked at, or nothing that fits."""


class WrapError(SamestepError):
    """A model cannot be wrapped as it is, or was changed after it was wrapped."""


class CommunicationError(SamestepError):
    """Ranks that should act together did not."""


class RankMissing(CommunicationError):
    """A rank did not come to a place that all ranks must reach."""


class OnceFailed(CommunicationError):
    """What one rank did for all failed with an error that cannot travel; its text is here."""


class ReplicasDiffer(CommunicationError):
    """Ranks hold different weights where they must hold the same."""


class CheckpointError(SamestepError):
    """A checkpoint cannot be written, read, or does not belong to this run."""


class TeacherError(SamestepError):
    """A frozen teacher cannot be built, read or placed as asked, or did not answer."""


class LogError(SamestepError):
    """Something was logged that cannot be written down."""
