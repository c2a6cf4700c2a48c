"""The registry: signed records in a Kademlia network, over the `kademlia` package.

The package is the substrate (ids, buckets, framing, socket); what it leaves open for a live swarm
(deadlines, verified and expiring records, hostile input) is ours: `wire` is the datagrams and `protocol`
the talk with one node, `liveness` remembers who answers, `table` whom we know, `lookup` finds the nodes
nearest a key, `storage` holds records, `mirror` is what we have read of others, and `node` is the whole.
"""

from p2pllm.dht.node import DhtNode

__all__ = ["DhtNode"]
