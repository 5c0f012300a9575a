"""Copies of a run's state in the memory of other hosts: callbacks.elastic.copies (docs/elastic.md).

server.py    the process on each host that holds copies in its memory, and outlives the ranks
started.py   the driver's side: starts a server on each host, and knows their addresses
client.py    a rank's side of a connection to a server
layout.py    what a rank sends: a safetensors file without a copy
peers.py     the servers, as a rank uses them
store.py     the copies as a store of checkpoints, from which a run resumes
policy.py    when a copy is made, and where it goes
"""
