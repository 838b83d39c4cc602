"""Group requests that begin alike, and put the groups into batches.

The choices of one question mostly share its text. The model reads the common prefix of a group
once, and then what each request has after it.
"""

from dataclasses import dataclass
from itertools import takewhile

# A request joins a group only if this saves at least this fraction of its own tokens, because the
# second forward pass has a cost of its own.
MIN_SAVED_FRACTION = 0.25
# Number of token positions in a batch, with padding, so that a batch of long sequences fits into
# memory.
MAX_BATCH_TOKENS = 2**16


@dataclass(frozen=True)
class Request:
    """A text whose last tokens are scored."""

    index: int  # among the requests of one call
    tokens: list[int]
    num_scored: int  # number of tokens that are scored, at the end

    @property
    def num_read(self) -> int:
        """Number of tokens that the model reads: all but the last one, which it predicts."""
        return len(self.tokens) - 1


@dataclass
class Group:
    """Requests with the same first `prefix_len` tokens, which are read once."""

    prefix_len: int
    requests: list[Request]

    @property
    def suffix_len(self) -> int:
        """The largest number of tokens that a request reads after the prefix."""
        return max(request.num_read for request in self.requests) - self.prefix_len


def truncate_request(
    index: int, context: list[int], continuation: list[int], max_len: int
) -> Request:
    """Return the request for a continuation, without the tokens on the left that do not fit.

    Args:
        max_len: number of tokens that the model can read

    Raises:
        ValueError: the continuation is longer than the model can read
    """
    if len(continuation) > max_len:
        raise ValueError(
            f"a continuation has {len(continuation)} tokens, but this model scores at most "
            f"block_size={max_len}; omit this task"
        )
    # one more than the model reads, because the last token is only predicted
    tokens = [*context, *continuation][-(max_len + 1) :]
    return Request(index, tokens, len(continuation))


def count_common_tokens(first: list[int], second: list[int]) -> int:
    """Return the number of tokens at the beginning in which two lists agree."""
    if first == second[: len(first)]:  # the usual case, much faster than the loop
        return len(first)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second)))


def group_requests(requests: list[Request], max_requests: int) -> list[Group]:
    """Group successive requests with a common prefix where this saves computation.

    A group has at most `max_requests` requests and MAX_BATCH_TOKENS tokens.
    """
    if not requests:
        return []
    groups = [Group(requests[0].num_read, requests[:1])]
    for request in requests[1:]:
        group = groups[-1]
        prefix = group.requests[0].tokens[: group.prefix_len]
        prefix_len = count_common_tokens(prefix, request.tokens[:-1])
        num_requests = len(group.requests) + 1
        # The new request does not read the common prefix again, but the others have to read by
        # themselves what is no longer common to all.
        num_saved = prefix_len * (num_requests - 1) - group.prefix_len * (num_requests - 2)
        max_len = max(request.num_read, group.prefix_len + group.suffix_len)
        if (
            num_requests <= max_requests
            and num_requests * max_len <= MAX_BATCH_TOKENS
            and num_saved >= MIN_SAVED_FRACTION * request.num_read
        ):
            group.prefix_len = prefix_len
            group.requests.append(request)
        else:
            groups.append(Group(request.num_read, [request]))
    return groups


def batch_groups(groups: list[Group], max_requests: int, max_len: int) -> list[list[Group]]:
    """Put groups of similar lengths into batches, the longest first.

    A batch has at most `max_requests` requests and MAX_BATCH_TOKENS tokens, unless it is a single
    group. All prefixes of a batch end at the same position, and the suffixes begin there, so the
    longest prefix and the longest suffix together must fit into `max_len` tokens. Groups without a
    suffix need a single pass, and get batches of their own.
    """
    batches: list[list[Group]] = []
    # of the last batch
    num_requests = 0
    prefix_len = 0
    suffix_len = 0
    longest_first = sorted(
        groups,
        key=lambda group: (group.suffix_len > 0, group.prefix_len, group.suffix_len),
        reverse=True,
    )
    for group in longest_first:
        new_num_requests = num_requests + len(group.requests)
        new_prefix_len = max(prefix_len, group.prefix_len)
        new_suffix_len = max(suffix_len, group.suffix_len)
        new_len = new_prefix_len + new_suffix_len
        if (
            batches
            and new_num_requests <= max_requests
            and new_len <= max_len
            and new_num_requests * new_len <= MAX_BATCH_TOKENS
            and (group.suffix_len > 0) == (suffix_len > 0)
        ):
            batches[-1].append(group)
            num_requests = new_num_requests
            prefix_len = new_prefix_len
            suffix_len = new_suffix_len
        else:
            batches.append([group])
            num_requests = len(group.requests)
            prefix_len = group.prefix_len
            suffix_len = group.suffix_len
    return batches
