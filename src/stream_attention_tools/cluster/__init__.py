"""What attention over many GPUs takes: what schemes send and compute, what that costs, and trials that check it."""
