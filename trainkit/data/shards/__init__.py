"""Samples in tar files ("shards") of WebDataset's layout, in a folder or on any fsspec URL, read by index.

store       files at a path or URL: read, fetched, written; errors in words
tar         which bytes of a tar are which file of which sample
index       the shards of a data set with their samples: index.json, read or made
cache       whole shards on this host's disk, up to a size, shared by its ranks and loader workers
dataset     a map-style Dataset over all of it, so that order, resume and `data check` are those of any other
order       a shuffle in two levels, kind to shards: an order of (seed, epoch), the same on any number of ranks
packer      an image folder to shards: `python -m trainkit data pack`
"""

from trainkit.data.shards.cache import ShardCache
from trainkit.data.shards.dataset import Sample, ShardDataset
from trainkit.data.shards.index import Index, Shard, find_index
from trainkit.data.shards.order import ShardOrder
from trainkit.data.shards.store import Store

__all__ = ["Index", "Sample", "Shard", "ShardCache", "ShardDataset", "ShardOrder", "Store", "find_index"]
