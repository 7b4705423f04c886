"""What a model and a machine need and give, found by trying: traces, calibrations."""
