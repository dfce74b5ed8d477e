"""One function per verb: the Python API, and the only place that composes rooms."""
