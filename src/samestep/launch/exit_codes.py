"""Exit codes with a meaning between ranks, launcher and cluster."""

# EX_TEMPFAIL of sysexits.h, "try again later": the ranks were warned, have saved what they had, and go on when started
# anew. No signal and no Python error gives this code by itself.
PREEMPTED = 75
# As a shell tells that SIGTERM ended a process: the ranks were asked to end and had nothing to save, so that starting
# them anew would begin at the beginning.
STOPPED = 143
# The next one, which no signal and no Python error gives either: the first steps ran out of memory, and half the
# micro-batch may fit.
OUT_OF_MEMORY = 76
# As timeout(1) has it: the launcher ended ranks that had not ended by themselves when their time was over.
TIME_IS_OVER = 124
