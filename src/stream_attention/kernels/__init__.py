"""Private: how states are computed. Reached through `ops` and `plan` only."""
