"""Traces of any PyTorch trainer: where each step went, and the one thing that holds it up. No torch."""
