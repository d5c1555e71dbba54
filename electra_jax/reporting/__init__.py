"""What a run has to show at its end: one page of HTML."""
