"""Checkpoints: commit, verify, restore onto any layout.

What is on disk can be listed and verified without torch, so only that is exported here. The rest is imported from its
file: `save.Checkpointer`, `restore.restore`, `restore.find`, `state.collect`, `state.apply`.
"""

from shardwise.checkpoints.manifest import Entry, list_checkpoints, newest_complete, remove_old, verify

__all__ = ["Entry", "list_checkpoints", "newest_complete", "remove_old", "verify"]
