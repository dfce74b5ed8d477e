"""Parses, calls a verb, prints. No logic."""
