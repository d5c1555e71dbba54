"""What a finished run answers to new text."""
