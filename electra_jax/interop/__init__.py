"""Weights of other frameworks, from and to our parameter tree."""
