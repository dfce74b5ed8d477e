"""Calibration: what this machine reaches, kernel by kernel, in the forms in which our trainer runs them. Needs torch.

Measured are kernels, never training steps. Every figure is the median of repeated runs after a warm-up. On a GPU the
runs wait in the stream behind a large product while the host queues them, so that what is timed is the device alone.
"""
