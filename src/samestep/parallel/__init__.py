"""A model on several ranks: DDP, FSDP2, mixed precision, compilation, BatchNorm and unused parameters."""
