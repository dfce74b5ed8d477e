"""Rehearsal: the real training step of any rank of any cluster, without the cluster."""
