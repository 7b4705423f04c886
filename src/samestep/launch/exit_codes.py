"""Exit codes with a meaning between ranks, launcher and cluster."""

# EX_TEMPFAIL of sysexits.h, "try again later": the ranks were warned, have saved what they had, and go on when started
# anew. No signal and no Python error gives this code by itself.
PREEMPTED = 75
