"""What is a pipeline's own: tied tables in checkpoints, and receive buffers that are given back."""

import pytest
import torch
from test_parity import SEQUENCE, SEQUENCES, Stream, full_weights, make_run

from shardwise.checkpoints.restore import restore
from shardwise.checkpoints.save import Checkpointer
from shardwise.checkpoints.state import apply, collect
from shardwise.data import Order
from shardwise.parallel.apply import build_parallel
from shardwise.parallel.compat import LeanStage
from shardwise.parallel.mesh import build_mesh
from shardwise.training.batches import Batches
from shardwise.training.loop import Trainer
