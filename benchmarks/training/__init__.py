"""Training truth: a small GPT learns the same from our attention as from torch's."""
