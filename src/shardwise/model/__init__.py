"""The transformer as plain PyTorch that knows nothing of parallelism."""
