"""The Hopper kernels compiled by several Triton releases, side by side on one GPU."""
