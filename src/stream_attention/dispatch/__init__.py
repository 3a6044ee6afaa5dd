"""From a public call to its launches: checks, plan, the launch cache, and the ops that torch.compile sees."""
