"""What is read together when continuations are scored: requests that begin alike, in batches.

The choices of one question mostly share its text: a group's common prefix is read once, then what
each request has after it.
"""

from dataclasses import dataclass
from itertools import takewhile

# A request joins a group where this share of reading it alone is saved: a second pass has a price.
WORTH_SHARING = 0.25
# Token positions of a batch, padding included, so that many long rows do not outgrow the memory.
TOKENS_AT_ONCE = 2**16


@dataclass(frozen=True)
class Request:
    """Tokens, the last `scored` of which count; number: its index among the requests."""

    number: int
    tokens: list[int]
    scored: int

    @property
    def read(self) -> int:
        """Number of tokens that the model reads: all but the last, which it only predicts."""
        return len(self.tokens) - 1


@dataclass
class Group:
    """Requests whose first `prefix` tokens are the same and are read once."""

    prefix: int
    members: list[Request]

    @property
    def rest(self) -> int:
        """The most tokens that a member reads after the prefix."""
        return max(member.read for member in self.members) - self.prefix


def truncated(number: int, context: list[int], continuation: list[int], length: int) -> Request:
    """The request for a continuation, cut at the left to the `length` tokens that a model reads.

    ValueError: no continuation, or one of more than `length` tokens.
    """
    if not 1 <= len(continuation) <= length:
        raise ValueError(
            f"a continuation of {len(continuation)} tokens: this model scores 1 to "
            f"block_size={length}"
        )
    return Request(number, [*context, *continuation][-(length + 1) :], len(continuation))


def shared_prefix(a: list[int], b: list[int]) -> int:
    """Number of first tokens in which a and b agree."""
    if a == b[: len(a)]:  # the usual case, at C's speed
        return len(a)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))


def grouped(requests: list[Request], rows: int) -> list[Group]:
    """Neighbours with a common beginning in groups, where that saves reading.

    A group has at most `rows` requests, and TOKENS_AT_ONCE.
    """
    groups = [Group(requests[0].read, requests[:1])] if requests else []
    for request in requests[1:]:
        group = groups[-1]
        prefix = shared_prefix(group.members[0].tokens[: group.prefix], request.tokens[:-1])
        # Read once instead of by each member; but the others read what they no longer share.
        saved = prefix * len(group.members) - group.prefix * (len(group.members) - 1)
        count = len(group.members) + 1
        fits = count * max(request.read, group.prefix + group.rest) <= TOKENS_AT_ONCE
        if count <= rows and fits and saved >= WORTH_SHARING * request.read:
            group.prefix = prefix
            group.members.append(request)
        else:
            groups.append(Group(request.read, [request]))
    return groups


def batched(groups: list[Group], rows: int, length: int) -> list[list[Group]]:
    """Groups of similar lengths in batches, longest first: at most `rows` requests and
    TOKENS_AT_ONCE in each, or a group by itself.

    In a batch the prefixes end at one place and the rests begin there: both together fit in
    `length`. Groups without a rest are read in one pass, and are in batches of their own.
    """
    batches: list[list[Group]] = []
    requests = prefix = rest = 0
    for group in sorted(groups, key=lambda g: (g.rest > 0, g.prefix, g.rest), reverse=True):
        wider = max(prefix, group.prefix), max(rest, group.rest)
        count = requests + len(group.members)
        fits = count <= rows and sum(wider) <= length and count * sum(wider) <= TOKENS_AT_ONCE
        if batches and fits and (group.rest > 0) == (rest > 0):
            batches[-1].append(group)
            requests, (prefix, rest) = count, wider
        else:
            batches.append([group])
            requests, prefix, rest = len(group.members), group.prefix, group.rest
    return batches
