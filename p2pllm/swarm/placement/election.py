"""Who leads: claims that are renewed, ordered by (epoch, peer id), and believed only while they are fresh.

A DHT gives no mutual exclusion, so none is assumed: at times there are two leaders, or none, and nobody is
harmed. Whoever leads goes on leading, and peers that join do not depose it. When it falls silent the others
stand in order of their ids, as in Raft (Ongaro and Ousterhout, 2014) with ranks in the place of random
delays, and like there an epoch that is over stays over: older claims no longer count.

Pure, and all times are local: when a claim was *received* is what counts, never when it says it was made.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from p2pllm.records import MAX_EPOCH, ClaimBody
from p2pllm.scheduling import PeerId

__all__ = ["CLAIM_S", "LEASE_S", "Election"]

CLAIM_S = 1.0
"""How often a leader renews its claim."""

LEASE_S = 3.0
"""How long a claim counts."""

ISSUE_S = 0.75 * LEASE_S
"""How long after its last renewal a leader still acts as one: less than others wait before they stand."""

RANK_S = 0.5
"""How much longer each peer waits than the one with the next higher id."""

MAX_RANK = 16
"""But no longer than the one of this rank: those before it are dead, or ids that somebody made up."""

REMEMBER_S = 600.0
"""How long sequence numbers are kept, so that no late copy of an old claim counts as a new one."""

MAX_STRANGERS = 16
"""Claims kept of those who are not, or not yet, in the view: anybody can make new ids."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """The newest claim of a peer."""

    claim: ClaimBody
    seq: int
    at: float


class Election:
    """One peer's view of who leads, and its own claim if it stands.

    ``epoch`` is the highest that this peer has seen a member claim, or remembers from before.
    """

    def __init__(self, own: PeerId, epoch: int = 0) -> None:
        self.epoch = epoch
        self.leader: PeerId | None = None
        """Who led at the last tick: perhaps this peer, even if it must not issue anything at the moment."""
        self.standing: int | None = None
        """The epoch that this peer claims, if it does."""
        self._own = own
        self._claims: dict[PeerId, _Heard] = {}
        self._eligible: frozenset[PeerId] = frozenset()
        self._floor = 0  # claims of earlier epochs are over
        self._sent_s = self._renewed_s = -math.inf
        self._joined_s = math.inf  # since when this peer can know who leads
        self._last_s = -math.inf  # when the last claim that counted was received
        self._last: PeerId | None = None  # from whom
        self._led_s = -math.inf  # when somebody led for the last time

    @property
    def claim(self) -> ClaimBody | None:
        """What another peer that leads has claimed."""
        heard = None if self.leader is None else self._claims.get(self.leader)
        return None if heard is None else heard.claim

    def hear(self, peer: PeerId, claim: ClaimBody, seq: int, now: float) -> bool:
        """Take in a verified claim; True if it is newer than what was known of ``peer``."""
        if peer == self._own:
            self._floor = max(self._floor, claim.epoch)  # of an earlier life, and over
            return False
        known = self._claims.get(peer)
        if known is not None and known.seq >= seq:
            return False
        self._claims.pop(peer, None)
        if peer not in self._eligible:
            strangers = [other for other in self._claims if other not in self._eligible]
            if len(strangers) >= MAX_STRANGERS:
                del self._claims[strangers[0]]  # the one that was heard longest ago
        self._claims[peer] = _Heard(claim, seq, now)
        return True

    def published(self, now: float) -> None:
        """A claim that this peer made at ``now`` has been stored by another: it is renewed."""
        self._renewed_s = max(self._renewed_s, now)

    def tick(self, now: float, eligible: Collection[PeerId], *, joined: bool) -> int | None:
        """The epoch to claim now, None if there is nothing to claim.

        ``eligible`` are the live peers that are not leaving, this one among them unless it is. ``joined``
        says that this peer has looked whether somebody leads.
        """
        self._eligible = frozenset(eligible)
        self._joined_s = min(self._joined_s, now) if joined else math.inf
        self._sift(now)
        best = self._best(now)
        if best is not None:
            self._last = best[1]
            self._last_s = self._claims[self._last].at
        if self.standing is not None and (
            not joined
            or self._own not in self._eligible
            or self.standing < self._floor
            or (best is not None and best > (self.standing, self._own))
        ):
            self.standing = None
        if self.standing is None and best is None and joined and self._own in self._eligible:
            self._stand_in_turn(now)
        if self.standing is not None and self._eligible <= {self._own, self._last}:
            self._renewed_s = now  # there is nobody to store it, but perhaps one who has fallen silent

        if self.standing is None:
            self.leader = None if best is None else best[1]
        else:
            self.leader = self._own if now - self._renewed_s < LEASE_S else None
        if self.leader is not None:
            self._led_s = now
        if self.standing is None or now - self._sent_s < CLAIM_S:
            return None
        self._sent_s = now
        return self.standing

    def _stand_in_turn(self, now: float) -> None:
        """Claim the next epoch, at once if nobody was ever heard to lead."""
        # Who fell silent is most likely dead, even if it is still in the view.
        rank = sum(peer > self._own for peer in self._eligible if peer != self._last)
        if now >= self._last_s + LEASE_S + RANK_S * min(rank, MAX_RANK):
            # Epochs end somewhere. In the last one the highest of those who claim leads, as in any other.
            self.standing = self.epoch = self._floor = min(self.epoch + 1, MAX_EPOCH)
            self._sent_s = self._renewed_s = -math.inf

    def leads(self, now: float) -> bool:
        """Whether this peer may issue plans: it was renewed lately, and nobody with a higher claim is
        about.
        """
        return (
            self.standing is not None
            and now - self._renewed_s < ISSUE_S
            and (self._best(now) or (0, "")) < (self.standing, self._own)
        )

    def leaderless_s(self, now: float) -> float:
        """How long nobody has led, as far as this peer can know: 0 before it has joined."""
        return 0.0 if self.leader is not None else max(0.0, now - max(self._led_s, self._joined_s))

    def _sift(self, now: float) -> None:
        """Forget what is long over, and see how far epochs have come among members."""
        for peer in [peer for peer, heard in self._claims.items() if now - heard.at > REMEMBER_S]:
            del self._claims[peer]
        for peer in self._claims.keys() & self._eligible:
            self._floor = max(self._floor, self._claims[peer].claim.epoch)
        self.epoch = max(self.epoch, self._floor)

    def _best(self, now: float) -> tuple[int, PeerId] | None:
        """The highest claim of another that counts now.

        One that has just joined may not have seen all members yet, so there a stranger is better than none.
        """
        fresh = [
            (heard.claim.epoch, peer)
            for peer, heard in self._claims.items()
            if now - heard.at < LEASE_S and heard.claim.epoch >= self._floor
        ]
        members = [claim for claim in fresh if claim[1] in self._eligible]
        return max(members or (fresh if now < self._joined_s + LEASE_S else ()), default=None)
