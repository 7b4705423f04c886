"""What runs inside of the ranks of `samestep verify`: it records what a script does, without changing it."""
