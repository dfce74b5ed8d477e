"""Text to token shards, shards to windows, and the order in which training reads them. No torch."""

from shardwise.data.builtin import builtin_data, resolve_data
from shardwise.data.index import DataIndex
from shardwise.data.mixture import MixedOrder, MixedStream
from shardwise.data.order import Order
from shardwise.data.prepare import prepare
from shardwise.data.progress import Progress
from shardwise.data.shards import Data, check_vocabulary, open_data
from shardwise.data.stream import TokenStream
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.data.windows import NO_TARGET, Stream, read_windows, validation_parts, validation_windows
from shardwise.data.workers import WorkerDied

__all__ = [
    "NO_TARGET",
    "Data",
    "DataIndex",
    "MixedOrder",
    "MixedStream",
    "Order",
    "Progress",
    "Stream",
    "TokenStream",
    "Tokenizer",
    "WorkerDied",
    "builtin_data",
    "check_vocabulary",
    "load_tokenizer",
    "open_data",
    "prepare",
    "read_windows",
    "resolve_data",
    "validation_parts",
    "validation_windows",
]
