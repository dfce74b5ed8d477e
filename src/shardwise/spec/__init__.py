"""The nouns, the presets, and legality. No torch."""

from shardwise.spec.checkpoint import Checkpoint, CheckpointFile
from shardwise.spec.cluster import Cluster, Figure, Gpu
from shardwise.spec.diagnosis import Diagnosis, Remedy
from shardwise.spec.layout import Layout
from shardwise.spec.memory import Memory
from shardwise.spec.model import Model
from shardwise.spec.noun import InputError, Noun
from shardwise.spec.recipe import CheckpointPolicy, Evaluation, Optimizer, Precision, Recipe, Schedule
from shardwise.spec.rope import RopeScaling
from shardwise.spec.run import Run, load_run, read_yaml
from shardwise.spec.step import Step

__all__ = [
    "Checkpoint",
    "CheckpointFile",
    "CheckpointPolicy",
    "Cluster",
    "Diagnosis",
    "Evaluation",
    "Figure",
    "Gpu",
    "InputError",
    "Layout",
    "Memory",
    "Model",
    "Noun",
    "Optimizer",
    "Precision",
    "Recipe",
    "Remedy",
    "RopeScaling",
    "Run",
    "Schedule",
    "Step",
    "load_run",
    "read_yaml",
]
