"""Arithmetic about a run that needs no torch, so that it starts in well under a second."""
