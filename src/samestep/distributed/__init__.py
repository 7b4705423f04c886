"""The ranks of a run acting together: the communicator, collectives and the metric sync."""
