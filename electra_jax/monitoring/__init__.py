"""What a run shows while it goes on: metrics, rates, warnings."""
