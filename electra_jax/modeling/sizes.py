"""Sizes that follow from others."""


def num_heads(hidden_size: int) -> int:
    """One attention head for every 64 of width, at least one (spec 1.1)."""
    return max(1, hidden_size // 64)
