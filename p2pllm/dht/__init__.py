"""The registry: signed records in a Kademlia network, over the `kademlia` package.

The package is the substrate (ids, buckets, framing); what it leaves open for a live swarm (deadlines, proven
ids, verified and expiring records, hostile input) is ours. From the datagram up: `contacts` says where nodes
are, `wire` is the datagrams, `exchange` questions and answers over one socket with `limits` on who asks and
`liveness` of who answers; `proof` shows who a node is. `protocol` is what a node asks and `answers` what it
answers, `table` whom it knows, `lookup` finds the nodes nearest a key. `storage` holds records, `pages` is
how they travel, `mirror` what we have read of others, `reading` how. `overlay` is the network of one address
family on one of the `sockets`, and `node` is the whole.
"""

from p2pllm.dht.contacts import Address, Contact
from p2pllm.dht.exchange import Wrap
from p2pllm.dht.node import DhtNode
from p2pllm.dht.pages import Digest
from p2pllm.dht.storage import Held

__all__ = ["Address", "Contact", "DhtNode", "Digest", "Held", "Wrap"]
