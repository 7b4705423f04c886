"""Which sample, where, with which luck."""
